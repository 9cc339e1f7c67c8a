//! Views of memory that the caller owns: an address, a shape and byte strides.

/// How a number of a cache, a query or an output is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// IEEE single precision.
    F32,
    /// The upper half of a single.
    Bf16,
    /// IEEE half precision.
    F16,
    /// A signed byte, times a scale.
    Int8,
    /// A byte of 4 exponent and 3 mantissa bits without infinities (e4m3fn), times a scale.
    Fp8,
}

impl Format {
    /// The size of one number.
    pub const fn bytes(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::Bf16 | Format::F16 => 2,
            Format::Int8 | Format::Fp8 => 1,
        }
    }
}

/// One layer's keys or values: `[num_blocks, num_kv_heads, block_size, head_dim]`, the last dimension contiguous.
#[derive(Debug, Clone, Copy)]
pub struct CacheView {
    /// Where block 0 starts.
    pub address: *mut u8,
    /// The first three dimensions.
    pub shape: [usize; 3],
    /// The last dimension.
    pub head_dim: usize,
    /// The byte strides of the first three dimensions.
    pub strides: [isize; 3],
    /// How its numbers are stored.
    pub format: Format,
}

impl CacheView {
    /// How many blocks there are.
    pub fn num_blocks(&self) -> usize {
        self.shape[0]
    }

    /// How many KV heads there are.
    pub fn num_kv_heads(&self) -> usize {
        self.shape[1]
    }

    /// How many tokens a block holds.
    pub fn block_size(&self) -> usize {
        self.shape[2]
    }

    /// The bytes of one token's row of one head.
    pub fn row_bytes(&self) -> usize {
        self.head_dim * self.format.bytes()
    }

    /// The address of a row. Wrapping arithmetic: it is a row's address if, and only if, the indices are in range.
    pub fn row(&self, block: usize, kv_head: usize, offset: usize) -> *mut u8 {
        let [of_block, of_head, of_slot] = self.strides;
        self.address
            .wrapping_offset(block as isize * of_block)
            .wrapping_offset(kv_head as isize * of_head)
            .wrapping_offset(offset as isize * of_slot)
    }
}

/// Queries, keys, values or outputs of a step: `[num_tokens, num_heads, head_dim]`, the last dimension contiguous.
#[derive(Debug, Clone, Copy)]
pub struct ActivationView {
    /// Where token 0 starts.
    pub address: *mut u8,
    /// The first two dimensions.
    pub shape: [usize; 2],
    /// The last dimension.
    pub head_dim: usize,
    /// The byte strides of the first two dimensions.
    pub strides: [isize; 2],
    /// How its numbers are stored.
    pub format: Format,
}

impl ActivationView {
    /// How many tokens there are.
    pub fn num_tokens(&self) -> usize {
        self.shape[0]
    }

    /// How many heads there are.
    pub fn num_heads(&self) -> usize {
        self.shape[1]
    }

    /// The address of a row; see [`CacheView::row`].
    pub fn row(&self, token: usize, head: usize) -> *mut u8 {
        self.address
            .wrapping_offset(token as isize * self.strides[0])
            .wrapping_offset(head as isize * self.strides[1])
    }
}

/// Which tokens belong to which sequence, and where the sequences' blocks are.
#[derive(Debug, Clone, Copy)]
pub struct StepView<'a> {
    /// The block tables, row after row.
    pub block_tables: &'a [i32],
    /// How many rows they have.
    pub num_table_rows: usize,
    /// The distance between two rows, in entries.
    pub table_stride: usize,
    /// How many entries a row has.
    pub num_columns: usize,
    /// Each batch row's length, its new tokens included.
    pub seq_lens: &'a [i32],
    /// Where each batch row's query tokens start, and where the last one's end.
    pub query_starts: &'a [i32],
    /// Each batch row's row of the tables; none: the same number.
    pub table_rows: Option<&'a [i32]>,
}

// SAFETY: a view is an address and numbers; what may be done with the memory is said where a view is used.
unsafe impl Send for CacheView {}
// SAFETY: as above; a shared view gives no access by itself.
unsafe impl Sync for CacheView {}
// SAFETY: as for `CacheView`.
unsafe impl Send for ActivationView {}
// SAFETY: as for `CacheView`.
unsafe impl Sync for ActivationView {}

/// What the numbers of an 8-bit cache are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scales {
    /// Nothing: the cache holds plain numbers.
    None,
    /// One number for all keys of the layer, and one for all values.
    Tensor {
        /// The keys' factor.
        key: f32,
        /// The values' factor.
        value: f32,
    },
    /// One number for each token and head.
    Token(ScalesView),
}

/// Scales `[num_blocks, 2, num_kv_heads, block_size]` as singles: of the keys, then of the values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScalesView {
    /// Where block 0 starts.
    pub address: *mut f32,
    /// The strides of the four dimensions, in singles.
    pub strides: [isize; 4],
}

/// Which of a token's two scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The keys'.
    Key = 0,
    /// The values'.
    Value = 1,
}

impl ScalesView {
    /// The address of a scale; see [`CacheView::row`].
    pub fn entry(&self, block: usize, side: Side, kv_head: usize, offset: usize) -> *mut f32 {
        let [of_block, of_side, of_head, of_slot] = self.strides;
        self.address
            .wrapping_offset(block as isize * of_block)
            .wrapping_offset(side as isize * of_side)
            .wrapping_offset(kv_head as isize * of_head)
            .wrapping_offset(offset as isize * of_slot)
    }
}

/// Log-sum-exps `[num_tokens, num_heads]` as singles.
#[derive(Debug, Clone, Copy)]
pub struct LogSumExpView {
    /// Where token 0 starts.
    pub address: *mut f32,
    /// The strides, in singles.
    pub strides: [isize; 2],
}

impl LogSumExpView {
    /// The address of an entry; see [`CacheView::row`].
    pub fn entry(&self, token: usize, head: usize) -> *mut f32 {
        self.address
            .wrapping_offset(token as isize * self.strides[0])
            .wrapping_offset(head as isize * self.strides[1])
    }
}

// SAFETY: as for `CacheView`.
unsafe impl Send for ScalesView {}
// SAFETY: as for `CacheView`.
unsafe impl Sync for ScalesView {}
// SAFETY: as for `CacheView`.
unsafe impl Send for LogSumExpView {}
// SAFETY: as for `CacheView`.
unsafe impl Sync for LogSumExpView {}
