//! The production prefix tree, with one of its own orders of eviction.

use pykv_core::prefix::CacheOptions;
use pykv_core::prefix::eviction::EvictionPolicy;
use pykv_core::{BlockPool, BlockSize, LayerGroup, PrefixCache, Result};

use super::Hits;
use crate::trace::Trace;

/// Replays a trace on the production tree over a pool that caches up to `num_blocks` blocks and evicts by a policy.
///
/// # Errors
/// [`pykv_core::Error::InvalidConfig`] if such a pool cannot be.
pub fn production(trace: &Trace, num_blocks: usize, eviction: &'static dyn EvictionPolicy) -> Result<Hits> {
    // A larger pool than the trace has blocks is one that never evicts, as one of that size is.
    let num_blocks = num_blocks.min(trace.num_blocks().max(1));
    // A symbol is looked up as the one token of a block of one token. The null block comes on top.
    let pool = BlockPool::new(num_blocks + 1, BlockSize::new(1)?)?;
    let options = CacheOptions { eviction, ..CacheOptions::default() };
    let mut cache = PrefixCache::with_options(pool, &[LayerGroup::Full], options)?;
    let scope = cache.enter_scope(&[]);
    let mut hits = Hits::default();
    let mut chain = Vec::new();
    for request in 0..trace.requests().len() {
        chain.clear();
        chain.extend(trace.blocks(request).take(num_blocks));
        let (mut tables, mut cursor) = cache.share(scope, &chain, chain.len());
        let found = cursor.published;
        cache.extend(&mut tables[0], chain.len() - found)?;
        cache.publish(&mut tables, &mut cursor, scope, &chain, chain.len());
        hits.count(trace, request, found);
    }
    hits.evictions = cache.evictions();
    Ok(hits)
}
