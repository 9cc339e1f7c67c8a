"""The specification: plain torch, one sequence at a time, for any device. Slow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pykv.attention.layer_cache import LayerCache
from pykv.attention.scales import KvScales, quantize, row_scales


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    table_rows: Tensor | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
    kv_scales: KvScales | None = None,
    log_sum_exp: Tensor | None = None,
) -> Tensor:
    """See `pykv.attention.paged_attention`. Sums in float32, or in float64 if the query is float64."""
    key_scales, value_scales = sides(kv_scales)
    out.zero_()
    if log_sum_exp is not None:
        log_sum_exp.fill_(-torch.inf)
    starts = query_starts.tolist()
    rows = range(len(starts) - 1) if table_rows is None else table_rows.tolist()
    for index, (row, seq_len) in enumerate(zip(rows, seq_lens.tolist(), strict=True)):
        tokens = slice(starts[index], starts[index + 1])
        num_queries = tokens.stop - tokens.start
        if num_queries == 0 or seq_len == 0:
            continue
        first = 0 if window is None else max(0, seq_len - num_queries - window + 1)
        keys = gather(key_cache, key_scales, block_tables[row], first, seq_len)
        values = gather(value_cache, value_scales, block_tables[row], first, seq_len)
        visible = visibility(num_queries, first, seq_len, window, query.device)
        scores = capped(grouped_scores(query[tokens], keys) * scale, softcap)
        scores = with_sinks(scores.masked_fill(~visible, -torch.inf), sinks)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
        if log_sum_exp is not None:
            log_sum_exp[tokens] = scores.logsumexp(dim=-1).T.float()
        out[tokens] = weighted_sum(weights, values, visible).to(out.dtype)
    return out


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: KvScales | None = None,
) -> None:
    """See `pykv.attention.write_kv`."""
    tokens = torch.nonzero(slot_mapping >= 0).flatten()
    slots = slot_mapping[tokens]
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    for cache, scales, rows in zip(
        (key_cache, value_cache), sides(kv_scales), (key[tokens], value[tokens]), strict=True
    ):
        if isinstance(scales, Tensor):
            scales[blocks, :, offsets] = row_scales(rows, cache.dtype)
            rows = quantize(rows, scales[blocks, :, offsets], cache.dtype)
        elif scales is not None:
            rows = quantize(rows, torch.full_like(rows[..., 0], scales, dtype=torch.float32), cache.dtype)
        cache.view(storage_dtype(cache))[blocks, :, offsets] = rows.view(storage_dtype(rows))


def copy_blocks(key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], pairs: Tensor) -> None:
    """See `pykv.attention.copy_blocks`."""
    sources, targets = pairs.unbind(1)
    for cache in (*key_caches, *value_caches):
        bits = cache.view(storage_dtype(cache))
        bits[targets] = bits[sources]


def transfer_blocks(sources: Sequence[LayerCache], targets: Sequence[LayerCache], pairs: Tensor) -> None:
    """See `pykv.attention.transfer_blocks`."""
    from_blocks, to_blocks = pairs.unbind(1)
    for source_layer, target_layer in zip(sources, targets, strict=True):
        for source, target in zip(source_layer.parts(), target_layer.parts(), strict=True):
            moved = source.view(storage_dtype(source))[from_blocks.to(source.device)]
            target.view(storage_dtype(target))[to_blocks.to(target.device)] = moved.to(target.device)


def sides(kv_scales: KvScales | None) -> tuple[Tensor | float | None, Tensor | float | None]:
    """Returns the scales of the keys and of the values: [num_blocks, num_kv_heads, block_size], or numbers."""
    if kv_scales is None:
        return None, None
    if isinstance(kv_scales, Tensor):
        return kv_scales[:, 0], kv_scales[:, 1]
    return kv_scales


def storage_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype as which bytes are moved: torch indexes no float8."""
    return torch.uint8 if tensor.dtype is torch.float8_e4m3fn else tensor.dtype


def gather(cache: Tensor, scales: Tensor | float | None, table: Tensor, first: int, end: int) -> Tensor:
    """Returns [num_kv_heads, end - first, head_dim]: one sequence's positions [first, end), no other slot."""
    positions = torch.arange(first, end, device=cache.device)
    block_size = cache.shape[2]
    blocks = table[positions // block_size].long()
    rows = cache.view(storage_dtype(cache))[blocks, :, positions % block_size].view(cache.dtype)
    if scales is None:
        return rows.transpose(0, 1)
    factors = scales[blocks, :, positions % block_size, None] if isinstance(scales, Tensor) else scales
    return (rows.float() * factors).transpose(0, 1)


def visibility(
    num_queries: int, first: int, seq_len: int, window: int | None, device: torch.device
) -> Tensor:
    """Returns bool [num_queries, seq_len - first]: which keys each query sees."""
    queries = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    keys = torch.arange(first, seq_len, device=device)
    distance = queries - keys
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def grouped_scores(query: Tensor, keys: Tensor) -> Tensor:
    """Returns [num_heads, num_queries, num_keys]; head h reads KV head h // (num_heads // num_kv_heads)."""
    dtype = accumulation_dtype(query)
    num_queries, num_heads, head_dim = query.shape
    grouped = query.to(dtype).transpose(0, 1).reshape(keys.shape[0], -1, head_dim)
    scores = grouped @ keys.to(dtype).transpose(1, 2)
    return scores.reshape(num_heads, num_queries, keys.shape[1])


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Bends the scores into (-softcap, softcap)."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Adds each head's sink to [num_heads, num_queries, num_keys] as one more score."""
    if sinks is None:
        return scores
    column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, column], dim=-1)


def weighted_sum(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Returns [num_queries, num_heads, head_dim_v]: each query's weights times the values that it sees.

    A value that a query does not see is left out, not multiplied by zero: a NaN in it changes nothing.
    """
    num_heads, num_queries, num_keys = weights.shape
    values = values.to(weights.dtype)
    grouped = weights.reshape(values.shape[0], -1, num_queries, num_keys)
    if bool(torch.isfinite(values).all()):
        mixed = grouped @ values[:, None]
    else:
        mixed = torch.stack(
            [grouped[:, :, i, seen] @ values[:, seen] for i, seen in enumerate(visible)], dim=2
        )
    return mixed.reshape(num_heads, num_queries, -1).transpose(0, 1)


def accumulation_dtype(query: Tensor) -> torch.dtype:
    """Returns the dtype of all sums."""
    return torch.float64 if query.dtype is torch.float64 else torch.float32
