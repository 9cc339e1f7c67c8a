//! What one call has to do, as flat lists: whose tokens, whose blocks, and the units that threads claim.

mod share;
mod validate;

use std::ops::Range;

use crate::{Error, SEGMENT, SPAN, StepView};

/// The most rows (query tokens times query heads of a KV head) that a unit takes, unless one token has more.
const UNIT_ROWS: usize = 128;

/// How many units each thread should find, so that all end at about the same time.
const UNITS_PER_THREAD: usize = 8;

/// The most bytes of a span that a unit asks for ahead of time: they wait in the second-level cache.
const SPAN_BYTES: usize = 1 << 18;

/// The cost below which one more thread is not worth its waking.
const THREAD_COST: usize = 1 << 16;

/// What a plan depends on besides the step itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlanShape {
    pub(crate) num_tokens: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    /// Bytes of a token's key and value of one head.
    pub(crate) token_bytes: usize,
    /// Tokens that a query sees, itself included.
    pub(crate) window: usize,
    pub(crate) num_threads: usize,
    /// Whether decodes that have the same blocks read them together.
    pub(crate) share_prefixes: bool,
}

impl PlanShape {
    /// Query heads of a KV head.
    pub(crate) fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// The first position that a query at `position` sees.
    pub(crate) fn first_seen(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window)
    }

    /// How many KV heads a unit of this many tokens takes at most.
    fn heads_per_unit(&self, num_tokens: usize) -> usize {
        if num_tokens > 1 { 1 } else { (SPAN_BYTES / SPAN / self.token_bytes).clamp(1, self.num_kv_heads) }
    }

    fn tokens_per_unit(&self) -> usize {
        (UNIT_ROWS / self.group()).max(1)
    }
}

/// One query token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token {
    /// Its row of the query and the output.
    pub(crate) index: usize,
    /// Its place in its sequence.
    pub(crate) position: usize,
    /// The first segment that it sees.
    pub(crate) first_segment: usize,
    /// Where its first segment's result is kept, if its segments are split among units.
    pub(crate) first_partial: usize,
    /// How many segments it sees, if they are split among units; otherwise 0.
    pub(crate) num_partials: usize,
}

/// Where a sequence's validated block ids are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Table {
    /// The place of its first id in the plan's list.
    pub(crate) start: usize,
    /// Which block of the sequence that is.
    pub(crate) first_block: usize,
}

/// What a thread does at a stretch: a few tokens and KV heads over a range of segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unit {
    /// Places in the plan's list of tokens; their positions rise, or all see the whole range.
    pub(crate) tokens: Range<usize>,
    pub(crate) table: Table,
    /// One KV head, or several where a single token reads them: their memory lies side by side.
    pub(crate) kv_heads: Range<usize>,
    pub(crate) segments: Range<usize>,
    /// The positions that any of the tokens sees.
    pub(crate) seen: Range<usize>,
}

/// One batch row, checked.
#[derive(Debug, Clone, Copy)]
struct Row {
    first_token: usize,
    num_tokens: usize,
    length: usize,
    table: Table,
}

/// The lists; kept from call to call.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) units: Vec<Unit>,
    pub(crate) tokens: Vec<Token>,
    pub(crate) blocks: Vec<usize>,
    /// Tokens whose partial results must be merged.
    pub(crate) merges: Vec<usize>,
    /// Query tokens that see nothing.
    pub(crate) empty: Vec<Range<usize>>,
    pub(crate) num_partials: usize,
    pub(crate) num_threads: usize,
    rows: Vec<Row>,
    order: Vec<share::Candidate>,
}

impl Plan {
    /// Checks the step and fills the lists.
    pub(crate) fn fill(&mut self, step: &StepView, shape: &PlanShape) -> Result<(), Error> {
        self.clear();
        self.read_rows(step, shape)?;
        let cost = self.cost(shape);
        self.num_threads = shape.num_threads.min(1 + cost / THREAD_COST);
        let unit_cost = if self.num_threads == 1 {
            usize::MAX / SPAN_BYTES
        } else {
            (cost / (self.num_threads * UNITS_PER_THREAD)).max(1)
        };
        if shape.share_prefixes {
            self.add_shared(shape, unit_cost);
        }
        for index in 0..self.rows.len() {
            self.add_row(self.rows[index], shape, unit_cost);
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.units.clear();
        self.tokens.clear();
        self.blocks.clear();
        self.merges.clear();
        self.empty.clear();
        self.rows.clear();
        self.num_partials = 0;
    }

    fn cost(&self, shape: &PlanShape) -> usize {
        let of_row = |row: &Row| {
            let tokens_per_unit = shape.tokens_per_unit();
            let num_units = row.num_tokens.div_ceil(tokens_per_unit);
            let rows = row.num_tokens.min(tokens_per_unit) * shape.group();
            let first = shape.first_seen(row.length - row.num_tokens);
            num_units * cost(row.length - first, rows)
        };
        self.rows.iter().map(of_row).sum::<usize>() * shape.num_kv_heads
    }

    /// Adds the units of a row that reads alone, the last tokens first: they are the longest.
    fn add_row(&mut self, row: Row, shape: &PlanShape, unit_cost: usize) {
        let mut end = row.num_tokens;
        while end > 0 {
            let start = end.saturating_sub(shape.tokens_per_unit());
            let first = self.tokens.len();
            let position = row.length - row.num_tokens;
            let seen = shape.first_seen(position + start)..position + end;
            let segments = seen.start / SEGMENT..seen.end.div_ceil(SEGMENT);
            for offset in start..end {
                let first_seen = shape.first_seen(position + offset);
                self.tokens.push(Token {
                    index: row.first_token + offset,
                    position: position + offset,
                    first_segment: first_seen / SEGMENT,
                    first_partial: 0,
                    num_partials: 0,
                });
            }
            let tokens = first..self.tokens.len();
            let unit = Unit { tokens: tokens.clone(), table: row.table, kv_heads: 0..0, segments, seen };
            if self.add_units(&unit, shape, unit_cost) > 1 {
                self.keep_partials(tokens);
            }
            end = start;
        }
    }

    /// Gives each token a place for the result of each segment that it sees.
    fn keep_partials(&mut self, tokens: Range<usize>) {
        for place in tokens {
            let token = &mut self.tokens[place];
            token.first_partial = self.num_partials;
            token.num_partials = (token.position + 1).div_ceil(SEGMENT) - token.first_segment;
            self.num_partials += token.num_partials;
            self.merges.push(place);
        }
    }

    /// Adds units for all KV heads, in parts of about `unit_cost`, and returns into how many ranges the segments
    /// were cut.
    fn add_units(&mut self, whole: &Unit, shape: &PlanShape, unit_cost: usize) -> usize {
        let num_tokens = whole.tokens.len();
        let head_cost = cost(whole.seen.len(), num_tokens * shape.group());
        let most_heads = shape.heads_per_unit(num_tokens);
        let num_ranges = (most_heads * head_cost).div_ceil(unit_cost).clamp(1, whole.segments.len());
        let num_heads = (unit_cost * num_ranges / head_cost).clamp(1, most_heads);
        for segments in parts(whole.segments.clone(), num_ranges) {
            for kv_heads in parts(0..shape.num_kv_heads, shape.num_kv_heads.div_ceil(num_heads)) {
                self.units.push(Unit { kv_heads, segments: segments.clone(), ..whole.clone() });
            }
        }
        num_ranges
    }
}

/// Cuts a range into `count` parts that differ by at most one.
fn parts(range: Range<usize>, count: usize) -> impl Iterator<Item = Range<usize>> {
    let place = move |part: usize| range.start + range.len() * part / count;
    (0..count).map(move |part| place(part)..place(part + 1))
}

/// What a unit costs, in arbitrary units: each position is read, and each row computes with it.
fn cost(num_positions: usize, num_rows: usize) -> usize {
    num_positions * (24 + num_rows)
}
