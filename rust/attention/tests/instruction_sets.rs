//! A whole call with each instruction set against the portable one, over caches of every format. Sets that the machine
//! lacks are skipped by name.

use pykv_attention::{
    ActivationView, Attention, AttentionCall, CacheView, Format, InstructionSet, Options, Scales, ScalesView,
    StepView, WriteCall,
};

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 40;
const BLOCK_SIZE: usize = 16;
const NUM_BLOCKS: usize = 48;
const LENGTHS: [i32; 3] = [600, 33, 7];
const QUERIES: [usize; 3] = [1, 20, 1];

/// Numbers between -1 and 1, the same at each call.
fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as f32 / u32::MAX as f32 * 2.0 - 1.0
        })
        .collect()
}

fn bytes_of(numbers: &[f32], format: Format) -> Vec<u8> {
    match format {
        Format::F32 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
        Format::Bf16 => numbers.iter().flat_map(|&n| half::bf16::from_f32(n).to_le_bytes()).collect(),
        Format::F16 => numbers.iter().flat_map(|&n| half::f16::from_f32(n).to_le_bytes()).collect(),
        Format::Int8 | Format::Fp8 => unreachable!("caches of 8 bits are written by the crate"),
    }
}

fn numbers_of(bytes: &[u8], format: Format) -> Vec<f32> {
    let bits = |pair: &[u8]| u16::from_le_bytes([pair[0], pair[1]]);
    match format {
        Format::F32 => bytes.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect(),
        Format::Bf16 => bytes.chunks(2).map(|pair| half::bf16::from_bits(bits(pair)).to_f32()).collect(),
        _ => bytes.chunks(2).map(|pair| half::f16::from_bits(bits(pair)).to_f32()).collect(),
    }
}

fn activation(bytes: &mut [u8], heads: usize, format: Format) -> ActivationView {
    let row = HEAD_DIM * format.bytes();
    ActivationView {
        address: bytes.as_mut_ptr(),
        shape: [bytes.len() / (heads * row), heads],
        head_dim: HEAD_DIM,
        strides: [(heads * row) as isize, row as isize],
        format,
    }
}

fn cache(bytes: &mut [u8], format: Format) -> CacheView {
    let row = HEAD_DIM * format.bytes();
    CacheView {
        address: bytes.as_mut_ptr(),
        shape: [NUM_BLOCKS, KV_HEADS, BLOCK_SIZE],
        head_dim: HEAD_DIM,
        strides: [KV_HEADS * BLOCK_SIZE * row, BLOCK_SIZE * row, row].map(|stride| stride as isize),
        format,
    }
}

/// One layer's caches, filled through the crate, and the tables of the sequences.
struct Layer {
    keys: Vec<u8>,
    values: Vec<u8>,
    scales: Vec<f32>,
    format: Format,
}

impl Layer {
    fn new(query_format: Format, format: Format) -> Layer {
        let cache_bytes = NUM_BLOCKS * KV_HEADS * BLOCK_SIZE * HEAD_DIM * format.bytes();
        let mut layer = Layer {
            keys: vec![0; cache_bytes],
            values: vec![0; cache_bytes],
            scales: vec![f32::NAN; NUM_BLOCKS * 2 * KV_HEADS * BLOCK_SIZE],
            format,
        };
        let slots: Vec<i64> = (0..(NUM_BLOCKS * BLOCK_SIZE) as i64).collect();
        let [mut key, mut value] =
            [1, 2].map(|seed| bytes_of(&noise(slots.len() * KV_HEADS * HEAD_DIM, seed), query_format));
        let scales = layer.scales();
        let call = WriteCall {
            key: activation(&mut key, KV_HEADS, query_format),
            value: activation(&mut value, KV_HEADS, query_format),
            key_cache: cache(&mut layer.keys, format),
            value_cache: cache(&mut layer.values, format),
            scales,
            slots: &slots,
            num_threads: 1,
        };
        // SAFETY: the views describe the vectors above.
        unsafe { Attention::new().write_kv(&call) }.unwrap();
        layer
    }

    fn scales(&mut self) -> Scales {
        if !matches!(self.format, Format::Int8 | Format::Fp8) {
            return Scales::None;
        }
        let strides =
            [2 * KV_HEADS * BLOCK_SIZE, KV_HEADS * BLOCK_SIZE, BLOCK_SIZE, 1].map(|stride| stride as isize);
        Scales::Token(ScalesView { address: self.scales.as_mut_ptr(), strides })
    }

    fn attend(&mut self, query_format: Format, instructions: InstructionSet, options: Options) -> Vec<f32> {
        let num_tokens: usize = QUERIES.iter().sum();
        let mut query = bytes_of(&noise(num_tokens * HEADS * HEAD_DIM, 3), query_format);
        let mut out = vec![0xffu8; query.len()];
        let columns = NUM_BLOCKS / LENGTHS.len() * 3;
        let tables: Vec<i32> = (0..LENGTHS.len() * columns)
            .map(|place| ((place * 7 + 5) % (NUM_BLOCKS - 1)) as i32 + 1)
            .collect();
        let scales = self.scales();
        let call = AttentionCall {
            query: activation(&mut query, HEADS, query_format),
            key_cache: cache(&mut self.keys, self.format),
            value_cache: cache(&mut self.values, self.format),
            scales,
            out: activation(&mut out, HEADS, query_format),
            log_sum_exp: None,
            step: StepView {
                block_tables: &tables,
                num_table_rows: LENGTHS.len(),
                table_stride: columns,
                num_columns: columns,
                seq_lens: &LENGTHS,
                query_starts: &[0, 1, 21, 22],
                table_rows: None,
            },
            options,
            num_threads: 1,
            share_prefixes: true,
            instructions,
        };
        // SAFETY: the views describe vectors that live here.
        unsafe { Attention::new().paged_attention(&call) }.unwrap();
        numbers_of(&out, query_format)
    }
}

#[test]
fn every_instruction_set_gives_what_the_portable_one_gives() {
    let formats = [
        (Format::F32, Format::F32, 2e-5),
        (Format::F32, Format::Int8, 2e-5),
        (Format::F32, Format::Fp8, 2e-5),
        (Format::F16, Format::F16, 2e-3),
        (Format::F16, Format::Int8, 2e-3),
        (Format::Bf16, Format::Bf16, 1.2e-2),
        (Format::Bf16, Format::Int8, 1.2e-2),
        (Format::Bf16, Format::Fp8, 1.2e-2),
    ];
    let plain = Options { scale: 0.3, window: None, softcap: None, sinks: None };
    let bent = Options { window: Some(70), softcap: Some(2.0), sinks: Some(&[0.5; HEADS]), ..plain };
    let sets = [
        InstructionSet::Avx2,
        InstructionSet::Avx512,
        InstructionSet::Avx512Bf16,
        InstructionSet::Avx512Vnni,
    ];
    for set in sets {
        if set > InstructionSet::detect() {
            eprintln!("skipped: {}", set.name());
            continue;
        }
        for (query, cache, tolerance) in formats {
            let mut layer = Layer::new(query, cache);
            for options in [plain, bent] {
                let expected = layer.attend(query, InstructionSet::Portable, options);
                let found = layer.attend(query, set, options);
                let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
                assert!(largest > 0.01);
                for (found, expected) in found.iter().zip(&expected) {
                    let error = (found - expected).abs();
                    assert!(error <= tolerance * largest, "{} {query:?} {cache:?}: {error}", set.name());
                }
            }
        }
    }
}
