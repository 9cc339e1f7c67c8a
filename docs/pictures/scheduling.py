"""Pictures of who runs: preemption, queue orders and fairness, admission."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import groupby

from canvas import (
    ACTIVE,
    AGAIN,
    CACHED,
    DECODE,
    FAINT,
    FIRST,
    FREE,
    HOST,
    PREFILL,
    SECOND,
    WAITS,
    Canvas,
    Chart,
)
from run import Run

import pykv


@dataclass
class Timeline:
    """What a run does, step after step."""

    states: list[tuple[int, int, int]] = field(default_factory=list)
    computed: list[dict[int, str]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    stats: pykv.SchedulerStats | None = None

    def spans(self, request: int) -> list[tuple[str, int, int]]:
        """What a request does from its first computed step to its last: kind, first step, step after the last."""
        own = [step for step, kinds in enumerate(self.computed) if request in kinds]
        kinds = [(self.computed[step].get(request, "waits"), step) for step in range(own[0], own[-1] + 1)]
        runs = [(kind, [step for _, step in run]) for kind, run in groupby(kinds, key=lambda pair: pair[0])]
        return [(kind, steps[0], steps[-1] + 1) for kind, steps in runs]


def under_pressure(preemption: str) -> Timeline:
    """Five requests in a pool that cannot hold them all to their ends, admitted without looking ahead."""
    run = Run(
        num_blocks=25,
        num_host_blocks=25,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_model_len=96,
        admission="watermark",
        watermark=0.0,
        preemption=preemption,
    )
    arrivals = {0: [(1, 22), (2, 18)], 3: [(3, 20)], 5: [(4, 14)], 18: [(5, 12)]}

    def submit(step: int) -> None:
        for first, length in arrivals.get(step, []):
            run.scheduler.submit([first] * length, max_tokens=24)

    timeline, known, before = Timeline(), {}, 0
    for step, plan in enumerate(run.steps(submit)):
        timeline.stats = stats = run.scheduler.stats()
        timeline.states.append((stats.blocks_active, stats.blocks_cached, stats.blocks_free))
        timeline.host.append(stats.host_blocks_total - stats.host_blocks_free)
        if stats.preemptions > before:
            timeline.preempted.append(step)
        before = stats.preemptions
        kinds = {}
        for row in run.batch(plan):
            end = row.first_position + row.num_tokens
            again = row.first_position < known.get(row.request, 0)
            kinds[row.request] = "again" if again else "prefill" if row.num_tokens > 1 else "decode"
            known[row.request] = max(end, known.get(row.request, 0))
        timeline.computed.append(kinds)
    return timeline


def preemption() -> Canvas:
    """The pool's blocks by state, and who runs: the same requests with recompute and with swap."""
    canvas = Canvas(760, 560)
    colors = {"prefill": PREFILL, "decode": DECODE, "again": AGAIN, "waits": WAITS}
    runs = {mode: under_pressure(mode) for mode in ("recompute", "swap")}
    longest = max(len(timeline.states) for timeline in runs.values())
    for place, (mode, timeline) in enumerate(runs.items()):
        left, total = 55 + 370 * place, sum(timeline.states[0])
        chart = Chart(
            canvas,
            (left, 60),
            (310, 190),
            (longest, total),
            title=f'preemption="{mode}"',
            x_label="step",
            y_label="",
        )
        active, cached, free = zip(*timeline.states, strict=True)
        chart.bands([(ACTIVE, active), (CACHED, cached), (FREE, free)])
        for step in timeline.preempted:
            chart.mark(step, AGAIN)
        if any(timeline.host):
            chart.line([(step + 0.5, count) for step, count in enumerate(timeline.host)], HOST)
        for request in range(5):
            y = 315 + 26 * request
            canvas.text(left - 5, y + 13, "ABCDE"[request], anchor="end")
            for kind, start, end in timeline.spans(request):
                x, width = left + 310 * start / longest, 310 * (end - start) / longest
                canvas.box(x, y, width, 18, colors[kind], stroke="none")
        stats = timeline.stats
        for line, text in enumerate(
            (
                f"{stats.steps} steps, {stats.preemptions} preemptions",
                f"{stats.recomputed_tokens} tokens computed again",
                f"{stats.swapped_out_blocks} blocks copied out, {stats.swapped_in_blocks} in",
            )
        ):
            canvas.text(left, 475 + 16 * line, text)
    canvas.text(20, 22, "The pool's blocks, and below what each request does", bold=True)
    canvas.legend(
        400, 22, [(ACTIVE, "active"), (CACHED, "cached"), (FREE, "free"), (HOST, "held on the host")]
    )
    canvas.legend(
        20,
        545,
        [
            (PREFILL, "prefill"),
            (DECODE, "decode"),
            (AGAIN, "computes again"),
            (WAITS, "waits after a preemption"),
        ],
    )
    canvas.text(480, 545, "dashed: a preemption", color=AGAIN)
    return canvas


def queue_orders() -> Canvas:
    """The order in which the same waiting requests start, one at a time, under each queue order."""
    cached = list(range(100, 132))
    requests = [
        # name, prompt, tenant, priority
        ("A1", [1] * 64, b"A", 1),
        ("A2", [2] * 64, b"A", 0),
        ("A3", [*cached, 3, 3], b"A", 1),
        ("A4", [4] * 64, b"A", 1),
        ("B1", [5] * 64, b"B", 1),
        ("B2", [6] * 64, b"B", 1),
    ]
    canvas = Canvas(760, 235)
    canvas.text(20, 22, "Six requests wait; they start in this order, one at a time", bold=True)
    for line, order in enumerate(("fcfs", "priority", "longest_prefix", "fair_share")):
        run = Run(num_blocks=64, block_size=16, max_num_seqs=1, max_num_batched_tokens=128, queue_order=order)
        run.scheduler.submit(cached, max_tokens=1)
        list(run.steps())
        numbers = {
            run.scheduler.submit(prompt, max_tokens=16, tenant=tenant, priority=priority): name
            for name, prompt, tenant, priority in requests
        }
        started = dict.fromkeys(numbers[row.request] for plan in run.steps() for row in run.batch(plan))
        y = 45 + 36 * line
        canvas.text(20, y + 17, order)
        for place, name in enumerate(started):
            canvas.box(140 + 64 * place, y, 56, 26, DECODE if name[0] == "A" else SECOND)
            canvas.text(168 + 64 * place, y + 17, name, anchor="middle")
    canvas.legend(
        20, 208, [(DECODE, "tenant A: four requests, sent first"), (SECOND, "tenant B: two, sent last")]
    )
    canvas.text(
        20, 226, "A2 has priority 0, the others 1; half of the prompt of A3 and more is cached", color=FAINT
    )
    return canvas


def fairness() -> Canvas:
    """Tokens computed for a tenant that sends everything at once and for one that sends a request now and then."""
    canvas = Canvas(760, 330)
    for place, order in enumerate(("fcfs", "fair_share")):
        run = Run(
            num_blocks=512, block_size=16, max_num_seqs=4, max_num_batched_tokens=256, queue_order=order,
            enable_prefix_caching=False,
        )  # fmt: skip
        tenants: dict[int, str] = {}
        sent: dict[int, int] = {}
        first_token: dict[int, int] = {}

        def submit(
            step: int, run: Run = run, tenants: dict[int, str] = tenants, sent: dict[int, int] = sent
        ) -> None:
            if step == 0:
                for _ in range(32):
                    tenants[run.scheduler.submit([1] * 128, max_tokens=32, tenant=b"bulk")] = "bulk"
            if step % 20 == 10 and step < 200:
                request = run.scheduler.submit([2] * 64, max_tokens=16, tenant=b"chat")
                tenants[request], sent[request] = "chat", step

        served: dict[str, list[tuple[int, int]]] = {"bulk": [(0, 0)], "chat": [(0, 0)]}
        for step, plan in enumerate(run.steps(submit)):
            more = {"bulk": 0, "chat": 0}
            for row in run.batch(plan):
                more[tenants[row.request]] += row.num_tokens
                first_token.setdefault(row.request, step)
            for tenant, count in more.items():
                served[tenant].append((step + 1, served[tenant][-1][1] + count))
        waited = [first_token[request] - step for request, step in sent.items()]
        chart = Chart(
            canvas, (60 + 370 * place, 60), (290, 200), (320, 6000),
            title=f'queue_order="{order}"', x_label="step", y_label="tokens computed",
        )  # fmt: skip
        chart.line(served["bulk"], FIRST)
        chart.line(served["chat"], SECOND)
        text = f"a chat waits {sum(waited) / len(waited):.0f} steps to start, at most {max(waited)}"
        canvas.text(60 + 370 * place, 308, text)
    canvas.text(20, 22, "Tokens of two tenants", bold=True)
    canvas.legend(
        180, 22, [(FIRST, "bulk: 32 requests at step 0"), (SECOND, "chat: a request every 20 steps")]
    )
    return canvas


def admission() -> Canvas:
    """Blocks in use and preemptions of 64 requests at once, admitted by the watermark and by the forecast."""
    canvas = Canvas(760, 330)
    for place, rule in enumerate(("watermark", "forecast")):
        run = Run(
            num_blocks=257, block_size=16, max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=1024,
            admission=rule, enable_prefix_caching=False,
        )  # fmt: skip
        lengths = random.Random(5)
        for _ in range(64):
            run.scheduler.submit([1] * lengths.randint(16, 256), max_tokens=lengths.randint(16, 256))
        active, preemptions = [], [0]
        for _ in run.steps():
            stats = run.scheduler.stats()
            active.append(stats.blocks_active)
            preemptions.append(stats.preemptions)
        chart = Chart(
            canvas, (60 + 370 * place, 60), (290, 200), (700, 256),
            title=f'admission="{rule}"', x_label="step", y_label="",
        )  # fmt: skip
        chart.bands([(ACTIVE, active)])
        chart.line([(step, count) for step, count in enumerate(preemptions)], AGAIN)
        stats = run.scheduler.stats()
        again = f"{stats.recomputed_tokens:,} tokens computed again"
        text = f"{stats.steps} steps, {stats.preemptions} preemptions, {again}"
        canvas.text(60 + 370 * place, 308, text)
    canvas.text(20, 22, "64 requests at once in 256 blocks", bold=True)
    canvas.legend(250, 22, [(ACTIVE, "blocks in use"), (AGAIN, "preemptions so far")])
    return canvas
