"""Attention over a paged KV cache: one set of functions, several backends.

    >>> import torch
    >>> from pykv.attention import paged_attention, write_kv
    >>> key_cache = torch.zeros(4, 1, 2, 8)    # [num_blocks, num_kv_heads, block_size, head_dim]
    >>> value_cache = torch.zeros(4, 1, 2, 8)
    >>> key, value, query = torch.ones(3, 1, 8), torch.ones(3, 1, 8), torch.ones(3, 2, 8)
    >>> slots = torch.tensor([2, 3, 6])        # three tokens in the blocks 1 and 3
    >>> write_kv(key, value, key_cache, value_cache, slots)
    >>> output = paged_attention(
    ...     query, key_cache, value_cache,
    ...     block_tables=torch.tensor([[1, 3]], dtype=torch.int32),
    ...     seq_lens=torch.tensor([3], dtype=torch.int32),
    ...     query_starts=torch.tensor([0, 3], dtype=torch.int32),
    ... )
    >>> output.shape, bool((output == 1).all())
    (torch.Size([3, 2, 8]), True)

Every argument is checked once, in the front; a backend is a module `<name>_backend` of this package with
functions of the same names. `torch_backend` is the specification. The whole contract is in
`docs/attention.md`.
"""

from pykv.attention.backends import Backend, backend_names
from pykv.attention.front import copy_blocks, paged_attention, write_kv
from pykv.attention.layer_cache import LayerCache
from pykv.attention.scales import KvScales, dequantize
from pykv.attention.transfer import transfer_blocks

__all__ = [
    "Backend",
    "KvScales",
    "LayerCache",
    "backend_names",
    "copy_blocks",
    "dequantize",
    "paged_attention",
    "transfer_blocks",
    "write_kv",
]
