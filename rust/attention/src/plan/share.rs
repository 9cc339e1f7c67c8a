//! Finds decodes whose tables begin with the same blocks, so that these are read once for all of them.

use super::{Plan, PlanShape, Row, Token, Unit};
use crate::SEGMENT;

/// A decode that may share, and how many of its leader's first segments are its own, too.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    first_block: usize,
    row: usize,
    num_shared: usize,
}

impl Plan {
    /// Takes the decodes that share whole segments out of the rows, and adds their units.
    pub(super) fn add_shared(&mut self, shape: &PlanShape, unit_cost: usize) {
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        for (row, entry) in self.rows.iter().enumerate() {
            if entry.num_tokens == 1 && entry.length >= SEGMENT && shape.first_seen(entry.length - 1) == 0 {
                order.push(Candidate { first_block: self.blocks[entry.table.start], row, num_shared: 0 });
            }
        }
        order.sort_unstable_by_key(|candidate| (candidate.first_block, candidate.row));
        let mut rest = &mut order[..];
        while let Some(leader) = rest.first() {
            let same = leader.first_block;
            let count = rest.partition_point(|candidate| candidate.first_block <= same);
            let (family, others) = rest.split_at_mut(count);
            self.add_family(family, shape, unit_cost);
            rest = others;
        }
        if order.iter().any(|candidate| candidate.num_shared > 0) {
            self.rows.retain(|row| row.num_tokens > 0);
        }
        self.order = order;
    }

    /// Adds the units of decodes that begin with the same block.
    fn add_family(&mut self, family: &mut [Candidate], shape: &PlanShape, unit_cost: usize) {
        let leader = self.rows[family[0].row];
        for candidate in &mut family[1..] {
            candidate.num_shared = self.shared_segments(&leader, &self.rows[candidate.row], shape);
        }
        family[1..].sort_unstable_by_key(|candidate| (usize::MAX - candidate.num_shared, candidate.row));
        let members = family.iter().skip(1).filter(|candidate| candidate.num_shared > 0).count();
        if members == 0 {
            return;
        }
        family[0].num_shared = family[1].num_shared;
        let family = &family[..=members];
        let first_token = self.tokens.len();
        for candidate in family {
            let row = self.rows[candidate.row];
            self.add_decode_token(&row);
            self.rows[candidate.row].num_tokens = 0;
        }
        self.keep_partials(first_token..self.tokens.len());
        self.add_shared_units(family, first_token, &leader, shape, unit_cost);
        for (offset, candidate) in family.iter().enumerate() {
            self.add_own_units(first_token + offset, candidate, shape, unit_cost);
        }
    }

    /// How many whole segments of `row` lie in the same blocks as the leader's.
    fn shared_segments(&self, leader: &Row, row: &Row, shape: &PlanShape) -> usize {
        let limit = leader.length.min(row.length) / SEGMENT;
        let ids = |row: &Row| &self.blocks[row.table.start..][..row.length.div_ceil(shape.block_size)];
        let same = ids(leader).iter().zip(ids(row)).take_while(|(a, b)| a == b).count();
        limit.min(same * shape.block_size / SEGMENT)
    }

    fn add_decode_token(&mut self, row: &Row) {
        self.tokens.push(Token {
            index: row.first_token,
            position: row.length - 1,
            first_segment: 0,
            first_partial: 0,
            num_partials: 0,
        });
    }

    /// Adds the units that read the leader's blocks: for each range of segments, the tokens that share all of it.
    fn add_shared_units(
        &mut self,
        family: &[Candidate],
        first_token: usize,
        leader: &Row,
        shape: &PlanShape,
        unit_cost: usize,
    ) {
        let mut start = 0;
        for last in (1..family.len()).rev() {
            let segments = start..family[last].num_shared;
            if segments.is_empty() {
                continue;
            }
            start = segments.end;
            let seen = segments.start * SEGMENT..segments.end * SEGMENT;
            let mut token = 0;
            while token <= last {
                let count = shape.tokens_per_unit().min(last + 1 - token);
                let tokens = first_token + token..first_token + token + count;
                let unit = Unit {
                    tokens,
                    table: leader.table,
                    kv_heads: 0..0,
                    segments: segments.clone(),
                    seen: seen.clone(),
                };
                self.add_units(&unit, shape, unit_cost);
                token += count;
            }
        }
    }

    /// Adds the units of the segments that a decode does not share.
    fn add_own_units(&mut self, place: usize, candidate: &Candidate, shape: &PlanShape, unit_cost: usize) {
        let row = self.rows[candidate.row];
        let segments = candidate.num_shared..row.length.div_ceil(SEGMENT);
        if segments.is_empty() {
            return;
        }
        let seen = segments.start * SEGMENT..row.length;
        let unit = Unit { tokens: place..place + 1, table: row.table, kv_heads: 0..0, segments, seen };
        self.add_units(&unit, shape, unit_cost);
    }
}
