"""Pictures of blocks: tables and copies, prefix hits, eviction, layer groups."""

from __future__ import annotations

import numpy as np
from canvas import ACTIVE, CACHED, FAINT, FIRST, FREE, INK, NULL, PREFILL, SECOND, SHARED, Canvas, Chart
from run import Run

import pykv

WORDS = ["-"]


def tokens_of(text: str) -> list[int]:
    """Words as token ids, and back with `WORDS[token]`."""
    WORDS.extend(word for word in dict.fromkeys(text.split()) if word not in WORDS)
    return [WORDS.index(word) for word in text.split()]


def tables() -> Canvas:
    """Tables and slots of three requests that begin alike, the third with two samples, in their second step."""
    prompts = {
        "A": tokens_of("You are a helpful bot . User : Hi there"),
        "B": tokens_of("You are a helpful bot . User : Why ?"),
        "C": tokens_of("You are a helpful bot . User : Tell a"),
    }
    sampled = tokens_of("Hello Because joke story")
    size = 4
    config = pykv.SchedulerConfig(num_blocks=9, block_size=size, max_num_seqs=4, max_model_len=32)
    scheduler, buffers = pykv.Scheduler(config), pykv.StepBuffers(config)
    slots = np.zeros((config.num_blocks, size), np.int64)  # stands for keys and values
    for name, prompt in prompts.items():
        scheduler.submit(prompt, max_tokens=2, num_samples=2 if name == "C" else 1)
    first = scheduler.plan(buffers)
    slots.ravel()[buffers.slot_mapping[: first.num_tokens]] = buffers.token_ids[: first.num_tokens]
    scheduler.apply(first, np.array(sampled), np.full(4, pykv.OUTCOME_OK, np.uint8))
    second = scheduler.plan(buffers)
    copies = buffers.copy_pairs[: second.num_copies].tolist()
    for source, target in copies:
        slots[target] = slots[source]
    slots.ravel()[buffers.slot_mapping[: second.num_tokens]] = buffers.token_ids[: second.num_tokens]

    rows = buffers.table_rows[: second.num_batch_rows].tolist()
    held = [
        buffers.block_tables[row, : -(-length // size)].tolist()
        for row, length in zip(rows, buffers.seq_lens, strict=False)
    ]
    holders = {block: sum(block in table for table in held) for block in range(config.num_blocks)}

    canvas = Canvas(760, 360)
    canvas.text(20, 22, "Block tables", bold=True)
    for place, (name, table) in enumerate(zip(("A", "B", "C, sample 0", "C, sample 1"), held, strict=True)):
        y = 36 + 30 * place
        canvas.text(20, y + 16, name)
        for column, block in enumerate(table):
            canvas.box(100 + 42 * column, y, 38, 24, SHARED if holders[block] > 1 else ACTIVE)
            canvas.text(119 + 42 * column, y + 16, str(block), anchor="middle")
    canvas.text(20, 182, f"The pool: {config.num_blocks} blocks of {size} slots", bold=True)
    for block in range(config.num_blocks):
        x, y = 20 + 245 * (block % 3), 192 + 42 * (block // 3)
        color = NULL if block == 0 else SHARED if holders[block] > 1 else ACTIVE if holders[block] else FREE
        canvas.box(x, y, 22, 24, color)
        canvas.text(x + 11, y + 16, str(block), anchor="middle", bold=True)
        for offset, token in enumerate(slots[block].tolist()):
            canvas.box(x + 22 + 52 * offset, y, 52, 24, "#ffffff")
            canvas.text(x + 48 + 52 * offset, y + 16, "" if token == 0 else WORDS[token], anchor="middle")
    for source, target in copies:
        canvas.text(330, 130, f"copy_pairs of this step: block {source} → block {target}", bold=True)
        canvas.text(330, 146, f"both samples held block {source}; the first that writes gets a copy")
    canvas.legend(330, 50, [(SHARED, "in several tables"), (ACTIVE, "in one table"), (FREE, "free")])
    canvas.legend(330, 68, [(NULL, "block 0, the null block: never handed out")])
    shared = sum(count > 1 for count in holders.values())
    used = sum(count > 0 for count in holders.values())
    cells = sum(map(len, held))
    canvas.text(
        20, 335, f"{cells} cells of {len(held)} tables, {used} blocks: {shared} are shared.", color=FAINT
    )
    return canvas


def prefix_hits() -> Canvas:
    """Where the blocks of four prompts come from: two that start together, one later, one of another scope."""
    system, endings = list(range(1, 17)), ([30, 31, 32, 33, 34], [40, 41, 42], [50, 51, 52, 53, 54, 55])
    run = Run(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    names = ["A", "B, together with A", "C, a step later", "D, as A in another scope"]

    def submit(step: int) -> None:
        if step == 0:
            run.scheduler.submit([*system, *endings[0]], max_tokens=3)
            run.scheduler.submit([*system, *endings[1]], max_tokens=3)
        if step == 1:
            run.scheduler.submit([*system, *endings[2]], max_tokens=3)
            run.scheduler.submit([*system, *endings[0]], max_tokens=3, scope=b"other tenant")

    canvas = Canvas(760, 250)
    colors = {"hit": CACHED, "twin": SHARED, "own": PREFILL}
    started: set[int] = set()
    for step, plan in enumerate(run.steps(submit)):
        written = set((run.buffers.slot_mapping[: plan.num_tokens] // 4).tolist())
        for row in run.batch(plan):
            if row.request in started:
                continue
            started.add(row.request)
            y = 50 + 42 * row.request
            canvas.text(20, y + 16, names[row.request])
            canvas.text(590, y + 16, f"step {step}: {row.num_tokens} tokens computed")
            for index, block in enumerate(run.table(row.row, row.first_position + row.num_tokens)):
                found = index * 4 < row.first_position
                source = "own" if not found else "twin" if block in written else "hit"
                canvas.box(190 + 64 * index, y, 60, 24, colors[source])
                color = "#ffffff" if source == "own" else INK
                canvas.text(220 + 64 * index, y + 16, f"block {block}", anchor="middle", color=color)
    canvas.legend(
        190,
        30,
        [
            (PREFILL, "computed"),
            (SHARED, "twin: being computed in the same step"),
            (CACHED, "hit: published before"),
        ],
    )
    canvas.text(
        190, 235, f"The prompts begin with the same {len(system)} tokens; a block holds 4.", color=FAINT
    )
    return canvas


def eviction() -> Canvas:
    """A prefix tree, and the order in which its blocks make room: read off the blocks that are handed out."""
    pool = pykv.BlockPool(num_blocks=9, block_size=1)
    cache = pykv.PrefixCache(pool)
    sequences = {
        "first": "system chat-1 turn-2 turn-3",
        "second": "document question",
        "third": "system chat-2",
    }
    block_of: dict[tuple[int, ...], int] = {}

    def use(tokens: list[int]) -> pykv.BlockTable:
        table, found = cache.share(tokens, max_tokens=len(tokens))
        cache.extend(table, len(tokens) - found)
        cache.publish(table, tokens, num_tokens=len(tokens))
        block_of.update({tuple(tokens[: depth + 1]): block for depth, block in enumerate(table.block_ids())})
        return table

    for text in sequences.values():
        use(tokens_of(text)).truncate(0)
    running = use(tokens_of("system chat-4"))
    asking, evicted = pool.table(), []
    while True:
        try:
            cache.extend(asking, 1)
        except pykv.OutOfBlocksError:
            break
        evicted.append(asking.block_ids()[-1])
    in_use = set(running.block_ids())
    place = {block: evicted.index(block) + 1 for block in block_of.values() if block not in in_use}

    canvas = Canvas(760, 260)
    canvas.text(20, 22, "A prefix tree; a block holds one word", bold=True)
    roots = [path for path in block_of if len(path) == 1]
    leaves = [path for path in block_of if not any(other[:-1] == path for other in block_of)]
    leaves.sort(key=lambda path: roots.index(path[:1]))
    rows = {path: 50 + 48 * index for index, path in enumerate(leaves)}
    for path in sorted(block_of, key=len, reverse=True):
        rows.setdefault(path, min(rows[other] for other in rows if other[: len(path)] == path))
    last_use = {tuple(tokens_of(text)): when for when, text in sequences.items()}
    for path, block in block_of.items():
        x, y = 20 + 140 * (len(path) - 1), rows[path]
        if len(path) > 1:
            parent = rows[path[:-1]]
            corner = [] if parent == y else [(x - 16, parent + 15)]
            canvas.line([(x - 30, parent + 15), *corner, (x - 16, y + 15), (x, y + 15)])
        canvas.box(x, y, 110, 30, ACTIVE if block in in_use else CACHED)
        label = "in use" if block in in_use else f"goes {place[block]}."
        canvas.text(x + 55, y + 13, WORDS[path[-1]], anchor="middle")
        canvas.text(x + 55, y + 26, label, anchor="middle", bold=True)
        if path in leaves:
            canvas.text(x + 120, y + 19, f"ended {last_use[path]}" if path in last_use else "runs")
    canvas.legend(20, 250, [(CACHED, "cached: nobody uses it"), (ACTIVE, "active: never evicted")])
    return canvas


def windows() -> Canvas:
    """Blocks that one sequence holds in each of two layer groups, against its length."""
    window, size, chunk, prompt, end = 512, 16, 256, 2048, 4096
    run = Run(
        num_blocks=1024,
        block_size=size,
        groups=(None, window),
        max_num_seqs=1,
        max_num_batched_tokens=chunk,
        max_model_len=end,
        enable_prefix_caching=False,
    )
    run.scheduler.submit(range(prompt), max_tokens=end - prompt)
    held: list[tuple[int, int, int]] = []
    for _ in run.steps():
        length = int(run.buffers.seq_lens[0])
        full, slides = np.count_nonzero(run.buffers.block_tables[:, 0], axis=1).tolist()
        held.append((length, full, slides))
    canvas = Canvas(790, 330)
    chart = Chart(
        canvas,
        (60, 50),
        (560, 220),
        (end, 280),
        title=f"Blocks of {size} tokens that one sequence holds: prompt of {prompt:,} tokens in chunks of {chunk}",
        x_label="tokens in the sequence",
        y_label="",
    )
    drawn = [point for point in held if point[0] <= prompt or point[0] % 33 == 0]
    chart.line([(length, full) for length, full, _ in drawn], FIRST)
    chart.line([(length, slides) for length, _, slides in drawn], SECOND)
    bound = -(-window // size) + 1
    decoding = {slides for length, _, slides in held if length > prompt + 1}
    chart.line([(0, bound), (end, bound)], FAINT, 1, "3 3")
    last = held[-1]
    chart.label(end, last[1], f" full attention: {last[1]}", FIRST)
    chart.label(end, last[2] + 10, f" window of {window}: {min(decoding)} to {max(decoding)}", SECOND)
    chart.label(end, bound - 20, f" ⌈{window} / {size}⌉ + 1 = {bound}", FAINT)
    most = max(slides for _, _, slides in held)
    chart.label(20, most + 8, f"with a chunk at most {most}", SECOND)
    return canvas
