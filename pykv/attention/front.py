"""The public functions: check every argument once, fill the defaults, hand over to a backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pykv.attention import checks, contents
from pykv.attention.backends import backend_for
from pykv.attention.layer_cache import as_numbers
from pykv.attention.scales import KvScales, check_cache_dtype, checked_scales, checked_scales_of_layers

_RESULTS_AND_INPUTS = (
    "out",
    "log_sum_exp",
    "query",
    "key_cache",
    "value_cache",
    "block_tables",
    "seq_lens",
    "query_starts",
    "table_rows",
    "sinks",
    "kv_scales",
)
_CACHES_AND_ROWS = ("key_cache", "value_cache", "kv_scales", "key", "value")


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    table_rows: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: KvScales | None = None,
    out: Tensor | None = None,
    log_sum_exp: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention of new tokens to their sequences' paged keys and values.

    Batch row i holds the query tokens [query_starts[i], query_starts[i+1]): the last ones of a sequence whose
    keys and values, these tokens' own included, fill seq_lens[i] slots. Decodes (one token) and chunks of
    prefill mix freely. A query at position q sees the keys k with 0 <= q - k, and q - k < window where a
    window is given.

    Args:
        query: [num_tokens, num_heads, head_dim_k], last dimension contiguous; num_heads is a multiple of
            num_kv_heads.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim_k or _v], the query's dtype,
            int8 or float8_e4m3fn; any strides but a contiguous last dimension. Slots that no sequence owns may
            hold anything.
        block_tables: int32 [num_table_rows, max_blocks]; only the entries that a length needs are read.
        seq_lens: int32 [num_rows]. A row of length 0 gives zeros.
        query_starts: int32 [num_rows + 1], from 0 upwards. Tokens after the last start get zeros.
        table_rows: int32 [num_rows], the table row of each batch row; None: row i.
        scale: factor of the scores; None: head_dim_k ** -0.5.
        window: tokens that a query sees, itself included, up to 2**31 - 1; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: as they are.
        sinks: [num_heads], a score for each head that takes weight in the softmax and adds no value; or None.
        kv_scales: for caches of 8 bits: float32 [num_blocks, 2, num_kv_heads, block_size], a scale for each
            token and head, first of the keys, then of the values; or two numbers, one for all keys and one for
            all values.
        out: [num_tokens, num_heads, head_dim_v] of the query's dtype, last dimension contiguous, sharing no
            memory with an input; None: a new tensor.
        log_sum_exp: float32 [num_tokens, num_heads], sharing no memory with an input or `out`; filled with the
            natural logarithm of the sum of the exponentials of each row's scores, the sink included; minus infinity
            where a row sees nothing.
        backend: "auto", "torch", "cpu" or "triton".

    Returns:
        `out`, filled: [num_tokens, num_heads, head_dim_v].

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a shape, stride, device or number does not fit, what is written shares memory, or the machine
            cannot run the backend; on a CPU also: a length or a block id is out of range. The message names the
            argument. Nothing was written.
    """
    device = checks.device_of("query", query)
    checks.check_activation("query", query, device)
    checks.check_no_grad("query", query)
    check_cache_dtype(key_cache, query.dtype)
    checks.check_caches(key_cache, value_cache, device)
    kv_scales = checked_scales(kv_scales, key_cache)
    checks.check_heads(query, key_cache)
    checks.check_step(block_tables, seq_lens, query_starts, table_rows, device)
    scale = checks.checked_scale(scale, query.shape[2])
    window, softcap = checks.checked_window(window), checks.checked_softcap(softcap)
    prepared_sinks = _prepared_sinks(sinks, query)
    extras = _prepared_extras(kv_scales, log_sum_exp, query)
    prepared_out = _prepared_out(out, query, value_cache.shape[3])
    loaded = backend_for(backend, device, query.dtype)
    loaded.check_extras(extras)
    if out is not None or log_sum_exp is not None:
        checks.check_apart(
            _RESULTS_AND_INPUTS,
            (
                out,
                log_sum_exp,
                query,
                key_cache,
                value_cache,
                block_tables,
                seq_lens,
                query_starts,
                table_rows,
                sinks,
                kv_scales if isinstance(kv_scales, Tensor) else None,
            ),
            num_written=2,
        )
    if device.type == "cpu" and not loaded.checks_contents:
        contents.check_rows(query.shape[0], block_tables, seq_lens, query_starts, table_rows)
        contents.check_tables(key_cache, block_tables, seq_lens, query_starts, table_rows, window)
    return loaded.functions.paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_starts=query_starts,
        table_rows=table_rows,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=prepared_sinks,
        out=prepared_out,
        **extras,
    )


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_scales: KvScales | None = None,
    backend: str = "auto",
) -> None:
    """Scatters one step's keys and values into the paged cache.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim_k or _v], last dimension contiguous.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim_k or _v], the keys' dtype, int8
            or float8_e4m3fn; any strides but a contiguous last dimension; changed in place: neither shares memory
            with itself, the other or the rows.
        slot_mapping: int64 [num_tokens]; slot = block_id * block_size + offset; -1 skips the token. Slots
            differ.
        kv_scales: for caches of 8 bits, as `paged_attention` takes them. A tensor of scales is written for each
            token; two numbers are used as they are.
        backend: "auto", "torch", "cpu" or "triton".

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a shape, stride or device does not fit, what is written shares memory, or the machine cannot run
            the backend; on a CPU also: a slot is out of range. Nothing was written.
    """
    device = checks.device_of("key", key)
    checks.check_activation("key", key, device)
    checks.check_activation("value", value, device)
    checks.check_tensor("value", value, 3, key.dtype, device)
    check_cache_dtype(key_cache, key.dtype)
    checks.check_caches(key_cache, value_cache, device)
    kv_scales = checked_scales(kv_scales, key_cache)
    checks.check_index("slot_mapping", slot_mapping, torch.int64, device)
    num_tokens = slot_mapping.shape[0]
    num_blocks, num_kv_heads, block_size, head_dim_k = key_cache.shape
    meaning = "(len(slot_mapping), num_kv_heads, head_dim)"
    checks.check_shape("key", key, (num_tokens, num_kv_heads, head_dim_k), meaning)
    checks.check_shape("value", value, (num_tokens, num_kv_heads, value_cache.shape[3]), meaning)
    token_scales = kv_scales if isinstance(kv_scales, Tensor) else None
    checks.check_apart(_CACHES_AND_ROWS, (key_cache, value_cache, token_scales, key, value), num_written=3)
    extras = {} if kv_scales is None else {"kv_scales": kv_scales}
    loaded = backend_for(backend, device, key.dtype)
    loaded.check_extras(extras)
    if device.type == "cpu" and not loaded.checks_contents:
        contents.check_slots(slot_mapping, num_blocks * block_size)
    loaded.functions.write_kv(key, value, key_cache, value_cache, slot_mapping, **extras)


def copy_blocks(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    pairs: Tensor,
    *,
    kv_scales: Sequence[KvScales | None] | None = None,
    backend: str = "auto",
) -> None:
    """Copies whole blocks, in every layer: what a sequence that shares a block needs before it writes to it.

    Args:
        key_caches, value_caches: one [num_blocks, num_kv_heads, block_size, head_dim_k or _v] tensor a layer;
            changed in place. Besides what `paged_attention` reads, uint8 is moved: rows that only their format reads.
        pairs: int64 [num_pairs, 2], (source block, target block). Targets differ, and none is a source.
        kv_scales: what `paged_attention` takes for each layer, None for one that is not int8 or float8_e4m3fn; or none
            at all where no layer is. Scales for each token and head are copied with their blocks.
        backend: "auto", "torch", "cpu" or "triton".

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a shape, stride or device does not fit, scales are missing, or the machine cannot run the backend;
            on a CPU also: a block is out of range, a target comes twice or is a source. Nothing was copied.
    """
    device = checks.check_pairs_of_blocks(pairs)
    checks.check_sequence("key_caches", key_caches)
    checks.check_sequence("value_caches", value_caches)
    checks.check_as_many("key_caches", key_caches, "value_caches", value_caches)
    for layer, (key_cache, value_cache) in enumerate(zip(key_caches, value_caches, strict=True)):
        _check_copied(f"key_caches[{layer}]", f"value_caches[{layer}]", key_cache, value_cache, device)
    scales = checked_scales_of_layers(kv_scales, key_caches)
    copied_scales = [own for own in scales if isinstance(own, Tensor)]
    for layer, own in enumerate(scales):
        if isinstance(own, Tensor):
            checks.check_writable(f"kv_scales[{layer}]", own)
    loaded = backend_for(backend, device, checks.widest_dtype(key_caches))
    if not len(key_caches) or not len(pairs):
        return
    if device.type == "cpu":
        contents.check_pairs(pairs, min(cache.shape[0] for cache in key_caches))
    loaded.functions.copy_blocks(
        [*map(as_numbers, key_caches), *(own[:, 0, :, :, None] for own in copied_scales)],
        [*map(as_numbers, value_caches), *(own[:, 1, :, :, None] for own in copied_scales)],
        pairs,
    )


def _check_copied(
    key_name: str, value_name: str, key_cache: Tensor, value_cache: Tensor, device: torch.device
) -> None:
    checks.check_moved(key_name, key_cache)
    checks.check_caches(key_cache, value_cache, device, key_name, value_name)
    checks.check_writable(key_name, key_cache)
    checks.check_writable(value_name, value_cache)


def _prepared_sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    checks.check_tensor("sinks", sinks, 1, None, query.device)
    checks.check_shape("sinks", sinks, (query.shape[1],), "(num_heads,)")
    if not sinks.dtype.is_floating_point:
        raise TypeError(f"sinks has dtype {sinks.dtype}; it must be a float type")
    return sinks.detach().to(torch.float32).contiguous()


def _prepared_extras(
    kv_scales: KvScales | None, log_sum_exp: Tensor | None, query: Tensor
) -> dict[str, KvScales | Tensor]:
    extras: dict[str, KvScales | Tensor] = {}
    if kv_scales is not None:
        extras["kv_scales"] = kv_scales
    if log_sum_exp is not None:
        checks.check_tensor("log_sum_exp", log_sum_exp, 2, torch.float32, query.device)
        checks.check_shape("log_sum_exp", log_sum_exp, tuple(query.shape[:2]), "(num_tokens, num_heads)")
        extras["log_sum_exp"] = log_sum_exp
    return extras


def _prepared_out(out: Tensor | None, query: Tensor, head_dim_v: int) -> Tensor:
    shape = (query.shape[0], query.shape[1], head_dim_v)
    if out is None:
        return query.new_empty(shape)
    checks.check_tensor("out", out, 3, query.dtype, query.device)
    checks.check_shape("out", out, shape, "(num_tokens, num_heads, head_dim_v)")
    checks.check_last_contiguous("out", out)
    return out
