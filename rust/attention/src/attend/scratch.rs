//! The memory that a thread works in.

use crate::SPAN;
use crate::ahead::Ahead;
use crate::buffer::Buffer;
use crate::kernels::Kernels;
use crate::merge::Part;

/// The sizes of a call's packed rows, in 32-bit words.
#[derive(Debug, Clone, Copy)]
pub(super) struct Geometry {
    pub(super) head_dim_k: usize,
    pub(super) head_dim_v: usize,
    /// Words of a packed query.
    pub(super) query_words: usize,
    /// Words of the keys that are scored at a time.
    pub(super) key_words: usize,
    /// Words of a line of packed values.
    pub(super) value_words: usize,
    /// Words of a row's sums.
    pub(super) sums_words: usize,
    /// Words of a row's packed weights.
    pub(super) weight_words: usize,
    /// Lines of packed values.
    pub(super) value_lines: usize,
    /// Bytes of the longest row of the caches.
    pub(super) row_bytes: usize,
}

impl Geometry {
    pub(super) fn new(
        head_dim_k: usize,
        head_dim_v: usize,
        number_bytes: usize,
        kernels: &Kernels,
    ) -> Geometry {
        let lanes_k = head_dim_k.div_ceil(kernels.values);
        Geometry {
            head_dim_k,
            head_dim_v,
            query_words: (kernels.packed_words)(head_dim_k),
            key_words: lanes_k.next_multiple_of(16) * kernels.scored_keys,
            value_words: head_dim_v.next_multiple_of(kernels.lanes * kernels.values),
            sums_words: head_dim_v.next_multiple_of(kernels.lanes * kernels.values),
            weight_words: (kernels.packed_words)(SPAN),
            value_lines: if kernels.many_rows.is_some() { SPAN / kernels.values } else { 0 },
            row_bytes: head_dim_k.max(head_dim_v) * number_bytes,
        }
    }

    /// Words of a result that is kept.
    pub(super) fn partial_words(&self) -> usize {
        (self.sums_words + 2).next_multiple_of(16)
    }
}

/// Running results of a unit's rows.
#[derive(Default)]
pub(super) struct RowParts {
    pub(super) maxima: Buffer,
    pub(super) totals: Buffer,
    pub(super) sums: Buffer,
    words: usize,
}

impl RowParts {
    fn reserve(&mut self, num_rows: usize, sums_words: usize) {
        self.maxima.reserve(num_rows);
        self.totals.reserve(num_rows);
        self.sums.reserve(num_rows * sums_words);
        self.words = sums_words;
    }

    /// Makes the first `num_rows` results those of no keys.
    pub(super) fn clear(&mut self, num_rows: usize) {
        for row in 0..num_rows {
            self.part(row).clear();
        }
    }

    /// The result of one row.
    pub(super) fn part(&mut self, row: usize) -> Part<'_> {
        Part {
            maximum: &mut self.maxima.as_floats()[row],
            total: &mut self.totals.as_floats()[row],
            sums: &mut self.sums.as_floats()[row * self.words..][..self.words],
        }
    }
}

/// Where the rows of a span are; positions that are not read point to zeros.
pub(super) struct SpanRows {
    pub(super) keys: [*const u8; SPAN],
    pub(super) values: [*const u8; SPAN],
}

impl SpanRows {
    /// Rows of which none is read.
    pub(super) fn none(zero_row: *const u8) -> SpanRows {
        SpanRows { keys: [zero_row; SPAN], values: [zero_row; SPAN] }
    }

    /// Moves all rows by these bytes.
    pub(super) fn shift(&mut self, keys: isize, values: isize) {
        for (key, value) in self.keys.iter_mut().zip(&mut self.values) {
            *key = key.wrapping_offset(keys);
            *value = value.wrapping_offset(values);
        }
    }
}

/// All of a thread's memory.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) queries: Buffer,
    pub(super) keys: Buffer,
    pub(super) values: Buffer,
    pub(super) scores: Buffer,
    pub(super) weights: Buffer,
    pub(super) factors: Buffer,
    /// What the next span reads.
    pub(super) ahead: Ahead,
    /// Factors that change nothing.
    pub(super) ones: Buffer,
    /// A line of values of which only one position is seen.
    pub(super) edge: Buffer,
    /// A row of a cache that is not there.
    pub(super) zeros: Buffer,
    /// The scales of the span's keys and values.
    pub(super) key_scales: Buffer,
    pub(super) value_scales: Buffer,
    /// The rows' results from the first segment on.
    pub(super) whole: RowParts,
    /// The rows' results in the present segment.
    pub(super) segment: RowParts,
}

impl Scratch {
    pub(super) fn reserve(&mut self, num_rows: usize, geometry: &Geometry) {
        self.queries.reserve(num_rows * geometry.query_words);
        self.keys.reserve(geometry.key_words);
        self.values.reserve(geometry.value_lines * geometry.value_words);
        self.scores.reserve(num_rows * SPAN);
        self.weights.reserve(num_rows * geometry.weight_words);
        self.factors.reserve(num_rows);
        self.edge.reserve(geometry.value_words);
        self.zeros.reserve(geometry.row_bytes.div_ceil(4));
        self.key_scales.reserve(SPAN);
        self.value_scales.reserve(SPAN);
        self.ones.reserve(num_rows);
        self.ones.as_floats().fill(1.0);
        self.whole.reserve(num_rows, geometry.sums_words);
        self.segment.reserve(num_rows, geometry.sums_words);
    }

    /// Merges the rows' present segment into what they have so far.
    pub(super) fn fold_segment(&mut self, num_rows: usize) {
        for row in 0..num_rows {
            self.whole.part(row).merge(&self.segment.part(row));
        }
    }

    /// The address of a row that holds zeros.
    pub(super) fn zero_row(&mut self) -> *const u8 {
        self.zeros.words().cast()
    }
}
