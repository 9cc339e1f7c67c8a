"""A plan as tables in the terminal."""

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from pykv.planner import KvPlan
from pykv.planner.comparison import GpuChoice
from pykv.planner.footprint import LayerGroup
from pykv.planner.sizes import show_bytes
from pykv.scheduler import SchedulerConfig

__all__ = ["show_plan"]

PLAIN_WIDTH = 110
KINDS = {
    "full": "full attention",
    "window": "sliding window",
    "latent": "latent attention, one latent a token",
    "shared": "read another layer's keys and values",
}
ROWS = {
    "shared_prefix": "{dtype}, shared prefix",
    "no_shared_prefix": "{dtype}, nothing shared",
    "int8": "int8, nothing shared",
    "int8_shared_prefix": "int8, shared prefix",
    "fp8": "fp8, nothing shared",
    "fp8_shared_prefix": "fp8, shared prefix",
}
LIMITS = {
    "max_num_seqs": "max_num_seqs",
    "longest_request": "the longest request does not fit",
    "weights": "the weights take most of the memory",
    "kv_memory": "memory for the KV cache",
}


def show_plan(plan: KvPlan) -> None:
    """Prints the plan."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    console.print(f"[bold]{plan.model}[/bold]", _gpus(plan), soft_wrap=True)
    console.print()
    console.print(_layers(plan))
    console.print(_requests_by_length(plan))
    if plan.budget is not None:
        console.print(_memory(plan))
    if plan.requests is not None:
        console.print(_fitting(plan))
    console.print(_levers(plan))
    for line in _sentences(plan):
        console.print(f"• {line}")


def show_comparison(plan: KvPlan, choices: Sequence[GpuChoice]) -> None:
    """Prints the GPUs, one a line, and what was compared: `plan` is the same without memory."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    console.print(f"[bold]{plan.model}[/bold], KV in {plan.kv_dtype}, blocks of {plan.block_size}")
    console.print()
    needed = choices[0].gpus_needed is not None
    columns = (
        "GPU",
        "memory",
        "tensor\nparallel",
        "requests\nan engine",
        "requests\na GPU",
        "tokens/s of each,\nat most",
    )
    table = _table("A mix of these requests on each GPU", *columns, *(["GPUs\nneeded"] if needed else []))
    for choice in choices:
        row = (
            choice.gpu,
            f"{choice.memory_bytes / 2**30:.1f} GiB",
            f"{choice.tensor_parallel}",
            f"{choice.requests:,}",
            f"{choice.requests_per_gpu:,.1f}",
            f"{1 / choice.read_seconds:,.0f}",
        )
        table.add_row(*row, *([f"{choice.gpus_needed:,}"] if needed else []))
    console.print(table)
    for line in (*_of_requests(plan), *_of_storage(plan)):
        console.print(f"• {line}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _gpus(plan: KvPlan) -> str:
    if plan.budget is None:
        return f"({plan.num_blocks:,} blocks)" if plan.num_blocks else "(no memory given)"
    copies = "" if plan.num_replicas == 1 else f", {plan.num_replicas} copies"
    return (
        f"on {plan.num_gpus} × {_gpu(plan.budget.total, plan.gpu)}, tensor parallel {plan.tensor_parallel}{copies}; "
        f"KV in {plan.kv_dtype}, blocks of {plan.block_size}"
    )


def _gpu(total: int, name: str | None) -> str:
    return show_bytes(total) if name is None else f"{name} of {show_bytes(total)}"


def _layers(plan: KvPlan) -> Table:
    table = _table("KV of one token", "layers", "number", "KV heads × size", "bytes", "scales")
    for group in plan.groups:
        scales = f"{group.kv_scale_bytes_per_token:,}" if group.kv_scale_bytes_per_token else ""
        table.add_row(
            _kind(group), str(group.num_layers), _shape(group), f"{group.kv_bytes_per_token:,}", scales
        )
    if plan.state_bytes_per_request:
        table.add_row(
            "state, of a fixed size", "", "", f"{show_bytes(plan.state_bytes_per_request)} a request", ""
        )
    table.add_section()
    total = f"{plan.kv_bytes_per_token:,} B"
    scales = f"{plan.kv_scale_bytes_per_token:,} B" if plan.kv_scale_bytes_per_token else ""
    table.add_row("all", str(sum(group.num_layers for group in plan.groups)), "", total, scales)
    return table


def _kind(group: LayerGroup) -> str:
    window = f" of {group.window:,} tokens" if group.window is not None else ""
    return KINDS[group.kind] + window


def _shape(group: LayerGroup) -> str:
    if group.kind == "latent":
        return f"{group.head_dim_k}"
    sizes = (
        f"{group.head_dim_k}"
        if group.head_dim_k == group.head_dim_v
        else f"{group.head_dim_k}/{group.head_dim_v}"
    )
    return f"{group.num_kv_heads} × {sizes}"


def _requests_by_length(plan: KvPlan) -> Table:
    stored = "in pykv's pool" if plan.storage == "engine" else "in blocks"
    table = _table("KV of one request", "tokens", "by the formula", stored, "")
    names = {int(tokens): name for name, tokens in reversed((plan.lengths or {}).items()) if name != "mean"}
    longest = (plan.lengths or {}).get("max", max(plan.kv_bytes_at))
    for tokens, num_bytes in plan.kv_bytes_at.items():
        if tokens > longest and tokens != plan.context_cap:
            continue
        note = "the cap" if tokens == plan.context_cap else names.get(tokens, "")
        table.add_row(f"{tokens:,}", show_bytes(num_bytes), show_bytes(plan.stored_kv_bytes_at[tokens]), note)
    return table


def _memory(plan: KvPlan) -> Table:
    budget = plan.budget
    assert budget is not None
    table = _table("Memory of each GPU", "", "size", "share")
    rows = (
        ("weights", budget.weights),
        ("reserve", budget.reserve),
        ("KV cache", budget.kv),
        ("not for this engine", budget.total - budget.usable),
    )
    for name, size in rows:
        if size:
            table.add_row(name, show_bytes(size), f"{size / budget.total:.1%}")
    table.add_section()
    table.add_row(
        f"blocks of {plan.block_size} tokens, {show_bytes(plan.rank_block_bytes)} each",
        f"{plan.num_blocks:,}",
        "",
    )
    return table


def _fitting(plan: KvPlan) -> Table:
    lengths = plan.lengths or {}
    names = [name for name in ("p50", "p90", "p99", "cap", "mix") if name in (plan.requests or {})]
    heads = {name: f"{name}\n{int(lengths[name]):,}" for name in names if name in lengths}
    heads |= {"cap": f"cap\n{plan.context_cap or 0:,}", "mix": f"mix\n{plan.risk:.1%} risk"}
    table = _table(
        "Requests that fit, all of one length, or of a mix", "KV cache", *(heads[name] for name in names)
    )
    for case, requests in (plan.requests_with or {}).items():
        if case.partition("_")[0] == plan.kv_dtype:
            continue  # the first rows say it
        label = ROWS[case].format(dtype=plan.kv_dtype)
        table.add_row(label, *(f"{requests.get(name, 0):,}" for name in names))
    return table


def _levers(plan: KvPlan) -> Table:
    table = _table("What would move it", "lever", "change", "kind", "mix", "× a GPU")
    table.columns[1].justify = "left"
    table.columns[2].justify = "left"
    for lever in plan.levers:
        mix = "" if lever.requests is None or lever.kind == "in use" else f"{lever.requests:,}"
        table.add_row(lever.lever, lever.change, lever.kind, mix, f"{lever.factor:.2f}")
    return table


def _sentences(plan: KvPlan) -> Iterator[str]:
    if plan.limit is not None:
        yield f"The limit: {LIMITS[plan.limit.what]}. {_capital(plan.limit.why)}."
    if plan.weights_bytes is not None:
        yield f"Weights: {show_bytes(plan.weights_bytes)} in {plan.weights_dtype}; {plan.weights_source}."
    yield from _of_requests(plan)
    yield from _of_users(plan)
    if plan.read_seconds is not None:
        yield (
            f"With a full pool a decode step reads weights and cache in {plan.read_seconds * 1000:.1f} ms at least: at "
            f"most {1 / plan.read_seconds:,.0f} tokens a second for each request."
        )
    yield from _of_storage(plan)
    if plan.requests is not None and plan.watermark < SchedulerConfig.watermark:
        yield (
            f"Admission is planned with a watermark of {plan.watermark:g}; an engine's default, "
            f"{SchedulerConfig.watermark:g}, leaves so much of its blocks free, and fewer may fit."
        )


def _of_requests(plan: KvPlan) -> Iterator[str]:
    if plan.lengths_source is not None and plan.lengths is not None:
        yield f"Requests: {plan.lengths_source}; on average {plan.lengths['mean']:,.0f} tokens."
    if plan.mix_assumes is not None:
        yield f"The risk of the mix, {plan.risk:.1%}, is for a load in which {plan.mix_assumes}."
    if plan.share_beyond_cap:
        yield (
            f"{plan.share_beyond_cap:.1%} of the requests are longer than the cap of {plan.context_cap or 0:,} tokens "
            "and counted as ending there."
        )


def _of_users(plan: KvPlan) -> Iterator[str]:
    users = plan.users
    if users is None:
        return
    yield f"{users.users:,} requests hold {show_bytes(users.kv_bytes)} of KV" + (
        "." if plan.kv_to_weights is None else f", {plan.kv_to_weights:.2f} × the weights."
    )
    if users.weights_passed_at is not None:
        yield f"Request number {users.weights_passed_at:,} makes the KV larger than the weights."
    if users.gpus_needed is not None and users.gpus_needed > plan.num_gpus:
        yield f"For {users.users:,} requests {users.gpus_needed:,} such GPUs are needed."


def _of_storage(plan: KvPlan) -> Iterator[str]:
    if plan.engine_refusal:
        yield f"pykv's Engine does not serve this model ({plan.engine_refusal}): the figures are by the formula."
        return
    if plan.storage == "formula":
        yield "The figures are by the formula, for an engine that gives back windows and stores latents as such."
        return
    stored, least = (
        plan.engine_kv_bytes_per_token or 0,
        plan.kv_bytes_per_token + plan.kv_scale_bytes_per_token,
    )
    if stored > least:
        yield f"pykv's pool stores {stored:,} B a token, {stored / least:.3g} × the formula; what fits counts that."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
