"""The scheduler under an engine of your own: numpy alone, and a toy model whose cache holds token ids.

The next token is the sum of all tokens so far, modulo the vocabulary. They are read through the block
tables, as attention would read keys and values, so that a wrong table gives a wrong answer.
"""

import numpy as np

import pykv

VOCAB_SIZE = 1000


class ToyModel:
    """Writes each token into its slot, and reads a sequence back through its block table."""

    def __init__(self, config: pykv.SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.cache = np.full(config.num_blocks * config.block_size, -1)  # slot -> token id

    def run(self, plan: pykv.Plan, step: pykv.StepBuffers) -> np.ndarray:
        """Computes one step; gives the next token of each sequence that is sampled."""
        for source, target in step.copy_pairs[: plan.num_copies]:
            self.blocks[target] = self.blocks[source]
        self.cache[step.slot_mapping[: plan.num_tokens]] = step.token_ids[: plan.num_tokens]
        ends = step.query_starts[1 : plan.num_batch_rows + 1] - 1  # each batch row's last token in the step
        next_tokens = {int(end): self.next_token(step, row) for row, end in enumerate(ends)}
        return np.array([next_tokens[int(index)] for index in step.sample_indices[: plan.num_samples]])

    def next_token(self, step: pykv.StepBuffers, batch_row: int) -> int:
        table = step.block_tables[step.table_rows[batch_row]]
        positions = np.arange(step.seq_lens[batch_row])
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        return int(self.cache[slots].sum() % VOCAB_SIZE)

    @property
    def blocks(self) -> np.ndarray:
        return self.cache.reshape(-1, self.block_size)


def generate(scheduler: pykv.Scheduler, model: ToyModel, step: pykv.StepBuffers) -> list[pykv.RequestSummary]:
    """Runs steps until nothing is left to run."""
    ended = []
    while (plan := scheduler.plan(step)) is not None:
        sampled = model.run(plan, step)
        outcomes = np.full(len(sampled), pykv.OUTCOME_OK, dtype=np.uint8)  # go on until max_tokens
        ended += scheduler.apply(plan, sampled, outcomes)
    return ended


def main() -> None:
    config = pykv.SchedulerConfig(num_blocks=65, block_size=16, max_num_seqs=8, max_num_batched_tokens=256)
    scheduler, step, model = pykv.Scheduler(config), pykv.StepBuffers(config), ToyModel(config)
    shared = list(range(1, 101))

    scheduler.submit([*shared, 7], max_tokens=20)
    (first,) = generate(scheduler, model, step)
    for ending in (8, 9, 10):
        scheduler.submit([*shared, ending], max_tokens=20)
    others = generate(scheduler, model, step)

    for summary in (first, *others):
        print(
            f"request {summary.request}: {summary.prompt_tokens} prompt tokens,"
            f" {summary.cached_tokens} of them from the cache, {summary.output_tokens} new"
        )
    stats = scheduler.stats()
    print(f"blocks: {stats.blocks_active} in use, {stats.blocks_cached} cached, {stats.blocks_free} free")


if __name__ == "__main__":
    main()
