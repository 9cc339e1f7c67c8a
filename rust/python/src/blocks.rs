//! `pykv._core.BlockPool`, `BlockTable` and `PrefixCache`: blocks without a scheduler.

use pykv_core::prefix::eviction::eviction_policy;
use pykv_core::prefix::{CacheOptions, Cursor, HashOptions};
use pykv_core::{
    BlockCopy, BlockPool as CorePool, BlockSize, BlockTable as CoreTable, Error, LayerGroup,
    PrefixCache as CoreCache, TokenId,
};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;

use crate::convert::{convert, read};
use crate::errors::exception;
use crate::guard::Guarded;

#[pyclass(frozen, module = "pykv._core")]
struct BlockPool {
    core: CorePool,
}

#[pymethods]
impl BlockPool {
    #[new]
    fn new(num_blocks: usize, block_size: usize) -> PyResult<Self> {
        let core = BlockSize::new(block_size).and_then(|size| CorePool::new(num_blocks, size));
        core.map(|core| Self { core }).map_err(|error| exception(&error))
    }

    fn table(&self) -> BlockTable {
        BlockTable::new(CoreTable::new(&self.core), None)
    }

    fn references(&self, block_id: u32) -> PyResult<usize> {
        if block_id as usize >= self.core.num_blocks() {
            let allowed = format!("0 to {}", self.core.num_blocks() - 1);
            return Err(exception(&Error::request("block_id", block_id, allowed)));
        }
        Ok(self.core.references(pykv_core::BlockId::new(block_id)))
    }

    /// (free, cached, active, total) blocks.
    fn count(&self) -> (usize, usize, usize, usize) {
        let counts = self.core.count();
        (counts.free, counts.cached, counts.active, counts.total)
    }
}

/// A table, and how far its blocks are published, if it was used with a cache.
struct Held {
    table: CoreTable,
    cursor: Option<Cursor>,
    /// The pool's resets before it took its first block.
    num_resets: u64,
}

#[pyclass(frozen, module = "pykv._core")]
struct BlockTable {
    held: Guarded<Held>,
}

impl BlockTable {
    fn new(table: CoreTable, cursor: Option<Cursor>) -> Self {
        let num_resets = table.pool().num_resets();
        Self { held: Guarded::new(Held { table, cursor, num_resets }) }
    }
}

#[pymethods]
impl BlockTable {
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.held.call(py, |held| Ok(held.table.len()))
    }

    fn block_ids(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.held.call(py, |held| Ok(held.table.blocks().iter().map(|block| block.get()).collect()))
    }

    fn extend(&self, py: Python<'_>, count: usize) -> PyResult<()> {
        self.held.call(py, |held| held.extend(|table| table.extend(count)))
    }

    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        self.held.call(py, |held| Ok(Self { held: Guarded::new(held.fork()) }))
    }

    fn truncate(&self, py: Python<'_>, len: usize) -> PyResult<()> {
        self.held.call(py, |held| held.truncate(len))
    }

    fn is_writable(&self, py: Python<'_>, index: usize) -> PyResult<bool> {
        self.held.call(py, |held| held.check_index(index).map(|()| held.table.is_writable(index)))
    }

    fn copy_on_write(&self, py: Python<'_>, index: usize) -> PyResult<(u32, u32)> {
        self.held.call(py, |held| held.copy_on_write(index, |table| table.copy_on_write(index)))
    }

    /// Panics inside the lock, so that a test can see what comes after.
    fn _panic(&self, py: Python<'_>) -> PyResult<()> {
        self.held.call(py, |_| panic!("asked to panic"))
    }
}

impl Held {
    fn fork(&self) -> Self {
        Self { table: self.table.fork(), ..*self }
    }

    /// Takes blocks. A table of none begins anew with them, whatever it has held before.
    fn extend(
        &mut self,
        take: impl FnOnce(&mut CoreTable) -> pykv_core::Result<()>,
    ) -> pykv_core::Result<()> {
        if self.table.is_empty() {
            (self.cursor, self.num_resets) = (None, self.table.pool().num_resets());
        }
        take(&mut self.table)
    }

    /// Replaces a block, if that may be.
    fn copy_on_write(
        &mut self,
        index: usize,
        replace: impl FnOnce(&mut CoreTable) -> pykv_core::Result<BlockCopy>,
    ) -> pykv_core::Result<(u32, u32)> {
        self.check_index(index)?;
        self.check_unpublished(index)?;
        replace(&mut self.table).map(|copy| (copy.source.get(), copy.target.get()))
    }

    fn check_index(&self, index: usize) -> pykv_core::Result<()> {
        if index < self.table.len() {
            return Ok(());
        }
        Err(Error::request("index", index, format!("below the table's {} blocks", self.table.len())))
    }

    /// A published block is read by whoever finds it: it is never replaced.
    fn check_unpublished(&self, index: usize) -> pykv_core::Result<()> {
        let published = self.cursor.map_or(0, |cursor| cursor.published);
        if index >= published {
            return Ok(());
        }
        Err(Error::request("index", index, format!("at least the {published} published blocks")))
    }

    /// Published blocks stay: what hangs below them is found through them.
    fn truncate(&mut self, len: usize) -> pykv_core::Result<()> {
        let published = self.cursor.map_or(0, |cursor| cursor.published);
        if len < published && len > 0 {
            return Err(Error::request(
                "length",
                len,
                format!("0, or at least the {published} published blocks"),
            ));
        }
        self.table.truncate(len);
        if len == 0 {
            self.cursor = None;
        }
        Ok(())
    }
}

/// A cache and the tokens of the call at hand.
struct Cached {
    core: CoreCache,
    tokens: Vec<TokenId>,
}

#[pyclass(frozen, module = "pykv._core")]
struct PrefixCache {
    cached: Guarded<Cached>,
}

#[pymethods]
impl PrefixCache {
    #[new]
    fn new(pool: &BlockPool, hash_seed: u64, eviction: &str) -> PyResult<Self> {
        let eviction = eviction_policy(eviction).map_err(|error| exception(&error))?;
        let hash = HashOptions { seed: hash_seed, ..HashOptions::default() };
        let options = CacheOptions { hash, eviction, ..CacheOptions::default() };
        let core = CoreCache::with_options(pool.core.clone(), &[LayerGroup::Full], options);
        let core = core.map_err(|error| exception(&error))?;
        Ok(Self { cached: Guarded::new(Cached { core, tokens: Vec::new() }) })
    }

    fn probe(
        &self,
        py: Python<'_>,
        tokens: PyBuffer<i32>,
        scope: &[u8],
        max_blocks: usize,
    ) -> PyResult<usize> {
        let tokens = read(py, &tokens, "tokens")?;
        self.cached.call(py, |cached| {
            convert_tokens(&mut cached.tokens, tokens)?;
            let scope = cached.core.enter_scope(scope);
            let hits = cached.core.probe(scope, &cached.tokens, max_blocks).hits;
            cached.core.leave_scope(scope);
            Ok(hits)
        })
    }

    fn share(
        &self,
        py: Python<'_>,
        tokens: PyBuffer<i32>,
        scope: &[u8],
        max_blocks: usize,
    ) -> PyResult<(BlockTable, usize)> {
        let tokens = read(py, &tokens, "tokens")?;
        self.cached.call(py, |cached| {
            convert_tokens(&mut cached.tokens, tokens)?;
            let scope = cached.core.enter_scope(scope);
            let (mut tables, cursor) = cached.core.share(scope, &cached.tokens, max_blocks);
            cached.core.leave_scope(scope);
            let hits = cursor.published;
            Ok((BlockTable::new(tables.remove(0), Some(cursor)), hits))
        })
    }

    fn extend(&self, py: Python<'_>, table: &BlockTable, count: usize) -> PyResult<()> {
        self.cached
            .call_with(py, &table.held, |cached, held| held.extend(|table| cached.core.extend(table, count)))
    }

    fn copy_on_write(&self, py: Python<'_>, table: &BlockTable, index: usize) -> PyResult<(u32, u32)> {
        self.cached.call_with(py, &table.held, |cached, held| {
            held.copy_on_write(index, |table| cached.core.copy_on_write(table, index))
        })
    }

    fn publish(
        &self,
        py: Python<'_>,
        table: &BlockTable,
        tokens: PyBuffer<i32>,
        scope: &[u8],
        num_tokens: usize,
    ) -> PyResult<bool> {
        let tokens = read(py, &tokens, "tokens")?;
        self.cached.call_with(py, &table.held, |cached, held| {
            convert_tokens(&mut cached.tokens, tokens)?;
            cached.publish(held, scope, num_tokens)
        })
    }

    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.cached.call(py, |cached| {
            cached.core.reset();
            Ok(())
        })
    }

    /// (free, cached, active, total) blocks, and how often one was evicted.
    fn count(&self, py: Python<'_>) -> PyResult<(usize, usize, usize, usize, u64)> {
        self.cached.call(py, |cached| {
            let counts = cached.core.counts();
            Ok((counts.free, counts.cached, counts.active, counts.total, cached.core.evictions()))
        })
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.cached.call_detached(py, |cached| cached.core.check())
    }
}

impl Cached {
    fn publish(&mut self, held: &mut Held, scope: &[u8], num_tokens: usize) -> pykv_core::Result<bool> {
        let size = self.core.pool().block_size();
        let (len, blocks) = (self.tokens.len(), held.table.len());
        if num_tokens > len || size.full_blocks(num_tokens) > blocks {
            let allowed =
                format!("at most {} (of {len} tokens and {blocks} blocks)", len.min(blocks * size.tokens()));
            return Err(Error::request("num_tokens", num_tokens, allowed));
        }
        let scope = self.core.enter_scope(scope);
        let cursor = held.cursor.get_or_insert_with(|| self.core.root_after(held.num_resets));
        let folded =
            self.core.publish(std::slice::from_mut(&mut held.table), cursor, scope, &self.tokens, num_tokens);
        self.core.leave_scope(scope);
        Ok(folded)
    }
}

pub(crate) fn convert_tokens(
    target: &mut Vec<TokenId>,
    tokens: &[pyo3::buffer::ReadOnlyCell<i32>],
) -> pykv_core::Result<()> {
    let wrong = |index, token| {
        Error::request("tokens", format!("{token} at position {index}"), "token ids of at least 0")
    };
    convert(target, tokens, |token| TokenId::try_from(token).ok(), wrong)
}

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<BlockPool>()?;
    module.add_class::<BlockTable>()?;
    module.add_class::<PrefixCache>()
}
