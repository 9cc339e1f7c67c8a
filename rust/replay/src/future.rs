//! When each block is used next: what no policy can know while it runs, and what the optimum is made of.

use crate::trace::Trace;

/// Blocks that follow each other in a prompt and are used next by the same request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The request that uses them next, or [`NEVER`].
    pub next: u32,
    /// Blocks.
    pub length: u32,
}

/// No request uses the block again.
pub const NEVER: u32 = u32::MAX;

/// For each request, when the blocks of its prompt are used next, as segments.
///
/// Whoever uses a block uses all before it. So along a prompt the next use never comes earlier, and few segments say it.
#[derive(Debug)]
pub struct Future {
    /// Where each request's segments start, and where the last one's end.
    first: Vec<u32>,
    segments: Vec<Segment>,
}

impl Future {
    /// The future of a trace of which only the first `max_blocks` blocks of each prompt count.
    pub fn new(trace: &Trace, max_blocks: usize) -> Self {
        let num_requests = trace.requests().len();
        let mut next_use = vec![NEVER; trace.num_blocks()];
        let mut lengths = vec![0; num_requests];
        let mut reversed = Vec::new();
        for request in (0..num_requests).rev() {
            let before = reversed.len();
            for block in trace.blocks(request).take(max_blocks) {
                let next = std::mem::replace(&mut next_use[block as usize], request as u32);
                match reversed[before..].last_mut() {
                    Some(Segment { next: same, length }) if *same == next => *length += 1,
                    _ => reversed.push(Segment { next, length: 1 }),
                }
            }
            reversed[before..].reverse();
            lengths[request] = (reversed.len() - before) as u32;
        }
        reversed.reverse();
        let ends = lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        Self { first: std::iter::once(0).chain(ends).collect(), segments: reversed }
    }

    /// A request's segments, along its prompt.
    pub fn segments(&self, request: usize) -> &[Segment] {
        &self.segments[self.first[request] as usize..self.first[request + 1] as usize]
    }

    /// When each block of a request's prompt is used next, along its prompt.
    pub fn next_uses(&self, request: usize) -> impl Iterator<Item = u32> {
        let repeat = |segment: &Segment| std::iter::repeat_n(segment.next, segment.length as usize);
        self.segments(request).iter().flat_map(repeat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serial::tests::trace_of;

    #[test]
    fn the_next_use_is_found_and_never_comes_earlier_along_a_prompt() {
        let trace = trace_of(&[&[0, 1, 2], &[0, 3], &[0, 1]]);
        let future = Future::new(&trace, usize::MAX);
        assert_eq!(future.next_uses(0).collect::<Vec<_>>(), [1, 2, NEVER]);
        assert_eq!(future.next_uses(1).collect::<Vec<_>>(), [2, NEVER]);
        assert_eq!(future.segments(2), [Segment { next: NEVER, length: 2 }]);
    }

    #[test]
    fn blocks_beyond_the_limit_do_not_count() {
        let trace = trace_of(&[&[0, 1, 2], &[0, 1, 2]]);
        let future = Future::new(&trace, 2);
        assert_eq!(future.segments(0), [Segment { next: 1, length: 2 }]);
    }
}
