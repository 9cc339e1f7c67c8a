"""Two models without weights that run through the real scheduler, block tables and sampler.

`ToyRunner` is a causal model of two layers in exact integer arithmetic. `ScriptedRunner` keeps the tokens themselves
as its KV and asks a rule for the next one, so that a test says what the model says.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pykv.engine.config import EngineConfig
from pykv.engine.engine import Engine
from pykv.text.token_pieces import _byte_of_character

EOS = 258
VOCAB_SIZE = 259
PRIME = 2**31 - 1
FACTORS = ((48271, 69621, 16807), (39373, 40692, 40014))  # of query, key and value in each layer


def byte_tokenizer() -> Tokenizer:
    """One token a byte, id = byte; three control tokens after them, the last of which ends a text."""
    backend = Tokenizer(models.BPE(vocab=dict(_byte_of_character()), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<s>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return backend


class Gate:
    """Lets a test hold the model before a step.

    Attributes:
        open: the model waits until it is set.
        entered: set when the model has been called.
    """

    def __init__(self):
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()

    def close(self):
        self.open.clear()
        self.entered.clear()

    def wait(self):
        self.entered.set()
        assert self.open.wait(30), "the test never opened the gate"


class PagedRunner:
    """What both models share.

    Attributes:
        raising: the model raises where one of these tokens is computed.
        broken: raised at every step, if set.
        num_steps: calls of `forward`.
        copied: pairs of blocks that were copied.
    """

    name = "toy"
    eos_token_ids = frozenset({EOS})
    vocab_size = VOCAB_SIZE
    device = torch.device("cpu")
    kv_bytes_per_token = 32
    windows = (None,)

    def __init__(self, num_blocks, block_size, max_model_len, num_host_blocks=0):
        self.num_blocks, self.block_size, self.max_model_len = num_blocks, block_size, max_model_len
        self.num_host_blocks = num_host_blocks
        self.raising, self.broken = set(), None
        self.gate = Gate()
        self.num_steps = 0
        self.copied = []

    def copy_blocks(self, pairs):
        for source, target in pairs.tolist():
            self.copied.append((source, target))
            for cache in self.caches:
                cache[target] = cache[source]

    def swap_out(self, pairs):
        self.swap(pairs, self.caches, self.host_caches)

    def swap_in(self, pairs):
        self.swap(pairs, self.host_caches, self.caches)

    @staticmethod
    def swap(pairs, sources, targets):
        for source, target in pairs.tolist():
            for from_cache, to_cache in zip(sources, targets, strict=True):
                to_cache[target] = from_cache[source]

    @property
    def host_caches(self):
        """Made at the first use: as the caches, for the host's blocks."""
        if not hasattr(self, "_host_caches"):
            shape = (self.num_host_blocks, self.block_size)
            self._host_caches = [torch.full(shape, -1) for _ in self.caches]
        return self._host_caches

    def forward(self, step):
        self.num_steps += 1
        self.gate.wait()
        if self.broken is not None:
            raise self.broken
        if self.raising & set(step.token_ids.tolist()):
            raise ValueError("this token is too much")
        return self.compute(step)

    def slots(self, step, batch_row):
        """The slots of the whole sequence of a batch row, in order."""
        length = int(step.seq_lens[batch_row])
        places = torch.arange(length)
        table = step.block_tables[step.table_rows[batch_row]].long()
        return table[places // self.block_size] * self.block_size + places % self.block_size

    @staticmethod
    def write(cache, slots, values):
        kept = slots >= 0
        cache.view(-1)[slots[kept]] = values[kept]


class ToyRunner(PagedRunner):
    """Two layers of linear attention modulo a prime: exact, and each token depends on all before it, in both layers."""

    def __init__(self, num_blocks, block_size=16, max_model_len=512, num_host_blocks=0):
        super().__init__(num_blocks, block_size, max_model_len, num_host_blocks)
        garbage = torch.Generator().manual_seed(1)
        shape = (num_blocks, block_size)
        self.caches = [torch.randint(PRIME, shape, generator=garbage) for _ in range(4)]

    def compute(self, step):
        hidden = embedded(step.token_ids, step.positions)
        for layer, (query, key, value) in enumerate(FACTORS):
            keys, values = self.caches[2 * layer : 2 * layer + 2]
            self.write(keys, step.slot_mapping, hidden * key % PRIME)
            self.write(values, step.slot_mapping, hidden * value % PRIME)
            hidden = self.attended(step, hidden, hidden * query % PRIME, keys.view(-1), values.view(-1))
        return logits_of(hidden[step.logits_indices])

    def attended(self, step, hidden, queries, keys, values):
        result = hidden.clone()
        for batch_row, (first, end) in enumerate(
            zip(step.query_starts[:-1], step.query_starts[1:], strict=True)
        ):
            slots = self.slots(step, batch_row)
            visible = torch.arange(len(slots)) <= step.positions[first:end, None]
            result[first:end] += mixed(queries[first:end], keys[slots], values[slots], visible)
        return result % PRIME


def embedded(token_ids, positions):
    return (token_ids * 1_000_003 + positions * 7919 + 12345) % PRIME


def mixed(queries, keys, values, visible):
    """The sum over the visible places of (query * key) * value, modulo the prime."""
    weights = queries[:, None] * keys % PRIME
    return ((weights * values % PRIME) * visible).sum(-1) % PRIME


def logits_of(hidden):
    """float32 [n, VOCAB_SIZE], whole multiples of 2 ** -17 below 8: exact."""
    tokens = torch.arange(1, VOCAB_SIZE + 1)
    numbers = (hidden[:, None] * (tokens * 104_729 % PRIME) % PRIME + tokens * tokens * 31_337) % PRIME
    return (numbers % 2**20).float() / 2**17


def toy_forward(token_ids):
    """The toy model without any cache: the logits after each token of a whole sequence."""
    tokens = torch.tensor(token_ids)
    places = torch.arange(len(tokens))
    hidden = embedded(tokens, places)
    for query, key, value in FACTORS:
        queries, keys, values = (hidden * factor % PRIME for factor in (query, key, value))
        hidden = (hidden + mixed(queries, keys, values, places <= places[:, None])) % PRIME
    return logits_of(hidden)


class ScriptedRunner(PagedRunner):
    """Reads back all tokens of a sequence from its slots and asks the rule for the next.

    Args:
        rule: from the list of tokens so far to the next token, or to float32 [VOCAB_SIZE] logits.
    """

    def __init__(self, rule, num_blocks, block_size=16, max_model_len=512):
        super().__init__(num_blocks, block_size, max_model_len)
        self.rule = rule
        self.caches = [torch.full((num_blocks, block_size), -1)]

    def compute(self, step):
        cache = self.caches[0]
        self.write(cache, step.slot_mapping, step.token_ids)
        logits = torch.zeros((len(step.logits_indices), VOCAB_SIZE))
        starts = step.query_starts.tolist()
        for index, token in enumerate(step.logits_indices.tolist()):
            batch_row = int(np.searchsorted(starts, token, side="right")) - 1
            slots = self.slots(step, batch_row)[: int(step.positions[token]) + 1]
            answer = self.rule(cache.view(-1)[slots].tolist())
            logits[index] = answer if isinstance(answer, torch.Tensor) else one_hot(answer)
        return logits


def one_hot(token_id):
    logits = torch.zeros(VOCAB_SIZE)
    logits[token_id] = 30.0
    return logits


def script(text):
    """A rule that says this text after any prompt that ends with a newline, then ends."""
    tokens = [*(text.encode() if isinstance(text, str) else text), EOS]

    def rule(history):
        said = history[len(history) - history[::-1].index(10) :] if 10 in history else tokens
        return tokens[min(len(said), len(tokens) - 1)]

    return rule


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Torch's threads spin while they wait for each other: beside other tests that costs many times what they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_toy_engine():
    """Makes an engine of the toy model; options are those of the engine, `tokenizer` of `Engine.from_runner`."""

    def make(*, num_blocks=256, block_size=16, max_model_len=512, num_host_blocks=0, **options):
        runner = ToyRunner(num_blocks, block_size, max_model_len, num_host_blocks)
        return Engine.from_runner(runner, byte_tokenizer(), EngineConfig(**options))

    return make


@pytest.fixture(scope="session")
def make_scripted_engine():
    """Makes an engine whose model says a text, or follows a rule; `engine.runner` is the model."""

    def make(rule, *, num_blocks=256, block_size=16, max_model_len=512, **options):
        runner = ScriptedRunner(
            rule if callable(rule) else script(rule), num_blocks, block_size, max_model_len
        )
        engine = Engine.from_runner(runner, byte_tokenizer(), EngineConfig(**options))
        engine.runner = runner
        return engine

    return make


@pytest.fixture(scope="session")
def toy_reference():
    """Continues a prompt by the toy model without cache, batch or scheduler."""

    def greedy(prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(toy_forward(tokens)[-1].argmax()))
            if tokens[-1] == EOS:
                break
        return tokens[len(prompt) :]

    return greedy


@pytest.fixture(scope="session")
def toy_logits():
    """The logits of the toy model after each token of a whole sequence, without cache."""
    return toy_forward
