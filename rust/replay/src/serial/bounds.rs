//! The two bounds that every policy lies between or below: a cache that forgets nothing, and one that knows the future.

use std::collections::BTreeMap;

use super::Hits;
use crate::future::Future;
use crate::trace::Trace;

/// Replays a trace on a cache that never evicts.
pub fn infinite(trace: &Trace) -> Hits {
    let mut hits = Hits::default();
    let mut seen = vec![false; trace.num_blocks()];
    for request in 0..trace.requests().len() {
        let found = trace.blocks(request).filter(|&block| std::mem::replace(&mut seen[block as usize], true));
        hits.count(trace, request, found.count());
    }
    hits
}

/// Replays a trace on a cache of `num_blocks` blocks that evicts what is used again last: no policy finds more.
///
/// Blocks are counted, not named. Whoever uses a block uses those before it, so the cached blocks whose next use is
/// request `r` are an unbroken part of `r`'s prompt. The deepest of the latest such part is evicted: a leaf. When `r`
/// comes, all that is cached of its prompt waits for `r`, and that is what it finds.
///
/// Source: L. A. Belady, *A study of replacement algorithms for a virtual-storage computer*, IBM Systems Journal 1966;
/// pages are asked for in sets here, and the exchange argument holds for sets.
pub fn optimum(trace: &Trace, num_blocks: usize) -> Hits {
    let future = Future::new(trace, num_blocks);
    let mut hits = Hits::default();
    let mut waiting: BTreeMap<u32, usize> = BTreeMap::new();
    let mut free = num_blocks;
    for request in 0..trace.requests().len() {
        let found = waiting.remove(&(request as u32)).unwrap_or(0);
        let needed: usize = future.segments(request).iter().map(|segment| segment.length as usize).sum();
        hits.count(trace, request, found);
        let missing = needed - found;
        while free < missing {
            let Some(mut latest) = waiting.last_entry() else { break };
            let evicted = (missing - free).min(*latest.get());
            *latest.get_mut() -= evicted;
            if *latest.get() == 0 {
                latest.remove();
            }
            free += evicted;
            hits.evictions += evicted as u64;
        }
        free -= missing;
        for segment in future.segments(request) {
            *waiting.entry(segment.next).or_default() += segment.length as usize;
        }
    }
    hits
}
