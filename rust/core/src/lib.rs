//! Bookkeeping of a paged KV cache.
