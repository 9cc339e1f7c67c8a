//! Paged attention and KV cache kernels for the CPU.
