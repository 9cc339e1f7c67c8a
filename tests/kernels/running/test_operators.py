"""The operators as torch sees them: declared mutations, fakes, whole graphs, nothing allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_cases import Case, PagedBatch, build, share_keys
from torch import Tensor, library
from torch.utils._python_dispatch import TorchDispatchMode

from pykv.attention import triton_backend
from pykv.kernels import operators
from pykv.kernels.arguments import Workspace


def attention_arguments(paged: PagedBatch, num_splits: int = 2) -> tuple[Any, ...]:
    sizes = (min(len(paged.query), paged.batch.num_rows), paged.query.shape[1], num_splits)
    workspace = Workspace(torch.empty(*sizes, paged.case.value_dim), torch.empty(sizes))
    return (
        paged.empty_result(),
        torch.empty(paged.query.shape[:2]),
        workspace.out,
        workspace.lse,
        paged.query,
        paged.caches.key,
        paged.caches.value,
        paged.caches.scales,
        paged.batch.block_tables,
        paged.batch.seq_lens,
        paged.batch.query_starts,
        paged.batch.table_rows,
        paged.rule.sinks,
        paged.rule.scale,
        paged.rule.window,
        paged.rule.softcap,
        None,
        0,
    )


def written_arguments(paged: PagedBatch) -> tuple[Any, ...]:
    key = torch.randn(3, 2, 64)
    slots = torch.tensor([17, -1, 40])
    return key, key + 1, paged.caches.key, paged.caches.value, paged.caches.scales, slots


def sharing_arguments(paged: PagedBatch) -> tuple[Any, ...]:
    return *attention_arguments(paged, 4)[:-2], torch.zeros((3, paged.batch.num_rows), dtype=torch.int32), 2


ARGUMENTS: dict[str, Callable[[PagedBatch], tuple[Any, ...]]] = {
    "write_kv": written_arguments,
    "copy_blocks": lambda paged: (*caches_of(paged), torch.tensor([[1, 2], [-1, 0]])),
    "transfer_blocks": lambda paged: (
        *caches_of(paged),
        *caches_of(build(Case(seed=1))),
        torch.tensor([[1, 2]]),
    ),
    "paged_attention": attention_arguments,
    "paged_attention, shared prefixes": sharing_arguments,
}


def caches_of(paged: PagedBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    return paged.caches.key, paged.caches.value, paged.caches.scales


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_operator_declares_what_it_changes_and_has_a_fake(name: str) -> None:
    arguments = ARGUMENTS[name](build(Case(rows=((1, 20), (1, 3)), num_heads=2)))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    library.opcheck(getattr(operators, name.partition(",")[0]), arguments, test_utils=checks)


@pytest.mark.parametrize("name", sorted({name.partition(",")[0] for name in ARGUMENTS}))
def test_no_argument_of_an_operator_has_a_default(name: str) -> None:
    """Of an operator that changes such an argument torch 2.11 cannot find it where it was left at its default."""
    schema = getattr(operators, name)._opoverload._schema
    assert not [argument.name for argument in schema.arguments if argument.has_default_value()]


def test_a_step_compiles_to_one_graph_and_computes_the_same() -> None:
    paged = build(Case(rows=((1, 20), (5, 9)), num_heads=2))
    paged.caches.key.nan_to_num_()
    paged.caches.value.nan_to_num_()

    def step(query: Tensor, key: Tensor, pool_key: Tensor, pool_value: Tensor, out: Tensor) -> Tensor:
        operators.write_kv(key, key * 2, pool_key, pool_value, None, torch.tensor([16, -1, 40]))
        arguments = list(attention_arguments(paged))
        arguments[0], arguments[4:7] = out, [query * 1.5, pool_key, pool_value]
        operators.paged_attention(*arguments)
        return out + 1

    key = torch.randn(3, 2, 64)
    results = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        caches = [cache.clone() for cache in caches_of(paged)[:2] if cache is not None]
        results.append((run(paged.query, key, *caches, paged.empty_result()), *caches))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_layer_through_the_backend_compiles_to_one_graph_and_computes_the_same(
    share_prefixes: bool,
) -> None:
    """What a model's layer calls: the workspace is allocated inside, its size a constant of the graph."""
    paged = build(Case(rows=((1, 300), (1, 290)), num_heads=2, head_dim_k=32))
    share_keys(paged, 0, 1, 272)
    paged.caches.key.nan_to_num_()
    paged.caches.value.nan_to_num_()
    tables = paged.batch.block_tables.clamp(min=0)

    def layer(query: Tensor, key: Tensor, pool_key: Tensor, pool_value: Tensor, slots: Tensor) -> Tensor:
        triton_backend.write_kv(key, key * 2, pool_key, pool_value, slots)
        out = triton_backend.paged_attention(
            query * 1.5,
            pool_key,
            pool_value,
            block_tables=tables,
            seq_lens=paged.batch.seq_lens,
            query_starts=paged.batch.query_starts,
            table_rows=None,
            scale=0.1,
            window=None,
            softcap=None,
            sinks=None,
            out=torch.empty_like(query),
            share_prefixes=share_prefixes,
        )
        return out + 1

    key, slots = torch.randn(2, 2, 32), torch.tensor([16, -1])
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        caches = [paged.caches.key.clone(), paged.caches.value.clone()]
        results.append((run(paged.query, key, *caches, slots), *caches))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


class Allocations(TorchDispatchMode):
    """Records the operators of torch that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [((1, 20), (1, 3)), ((1, 20), (5, 9), (0, 0))])
def test_attention_and_write_allocate_nothing_and_read_nothing_back(
    rows: tuple[tuple[int, int], ...],
) -> None:
    paged = build(Case(rows=rows, cache="e4m3", dtype=torch.float16))
    attention, writing = attention_arguments(paged), written_arguments(paged)
    sharing = sharing_arguments(paged)
    with Allocations() as seen:
        operators.write_kv(*writing)
        operators.paged_attention(*attention)
        operators.paged_attention(*sharing)
    assert seen.names
    views = {"aten.view.dtype", "aten.select.int", "aten.alias.default"}
    kernels = {"pykv.triton_write_kv.default", "pykv.triton_paged_attention.default"}
    assert set(seen.names) <= views | kernels
