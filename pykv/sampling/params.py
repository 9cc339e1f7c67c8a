"""What a request may ask of the sampler; every value is checked once, when the object is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pykv.errors import InvalidRequestError
from pykv.field_checks import as_boolean, as_integer, as_number_in, optional, refuse
from pykv.sampling import checks

MAX_TOKENS_LIMIT = 2**24
NUM_SAMPLES_LIMIT = 128
LOGPROBS_LIMIT = 20
STOP_STRINGS_LIMIT = 16
STOP_STRING_CHARACTERS_LIMIT = 256
STOP_TOKEN_IDS_LIMIT = 128
LOGIT_BIAS_LIMIT = 1024
LARGEST_LOGIT_BIAS = 100.0
SEED_LIMIT = 2**64 - 1

STRUCTURED_OUTPUT_OPTIONS = frozenset(
    {
        "choice",
        "grammar",
        "guided_choice",
        "guided_decoding",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "json_object",
        "json_schema",
        "regex",
        "response_format",
        "structural_tag",
        "structured_output",
        "structured_outputs",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Args:
        max_tokens: most output tokens of each sample; None = up to the context cap.
        min_tokens: for so many tokens no EOS and no stop token is sampled and no stop string looked for.
        temperature: 0 = greedy; otherwise the logits are divided by it.
        top_k: only the k likeliest tokens; 0 = all. Tokens as likely as the k-th stay in.
        top_p: only the likeliest tokens that together reach this probability, of what top_k left; 1 = all.
        min_p: only tokens at least this many times as likely as the likeliest; 0 = all.
        repetition_penalty: divides the positive logits of tokens in prompt or output, multiplies others.
        presence_penalty, frequency_penalty: taken from the logits of output tokens, once or per occurrence.
        seed: random numbers depend on it, the sample's index and the position alone; None = drawn anew. The tokens
            are the same wherever the logits are, whose last bits may differ with the batch on some models and machines.
        stop: the text ends before the first of these; the tokens of the stop string are still counted.
        stop_token_ids: sampling one of these ends the sample; the token is returned, its text is not.
        ignore_eos: the model's EOS tokens do not end the sample.
        logit_bias: added to the logits of these token ids.
        logprobs: log probabilities of each output token and of this many of the likeliest; None = none.
        prompt_logprobs: the same for the prompt's tokens, which are then all computed, whatever is cached.
        n: so many samples of one prompt.

    Raises:
        InvalidRequestError: a value is not allowed.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_distribution()
        self._check_ends()
        bias = checks.biases("logit_bias", self.logit_bias, most=LOGIT_BIAS_LIMIT, largest=LARGEST_LOGIT_BIAS)
        self._set("logit_bias", bias)
        for name in ("logprobs", "prompt_logprobs"):
            self._set(name, optional(as_integer, name, getattr(self, name), 0, LOGPROBS_LIMIT))

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Makes the parameters from named options.

        Raises:
            InvalidRequestError: an option is unknown, is one of structured output, or has a bad value.
        """
        known = {entry.name for entry in fields(cls)}
        for name in options:
            if name in STRUCTURED_OUTPUT_OPTIONS:
                raise InvalidRequestError(f"{name}: structured output is not served; leave it out", name)
            if name not in known:
                refuse("sampling option", name, f"one of {', '.join(sorted(known))}")
        return cls(**options)

    def validated(self, vocab_size: int) -> SamplingParams:
        """Returns itself when every token id that it names is in [0, vocab_size).

        Raises:
            InvalidRequestError: a stop token or a biased token is not in the vocabulary.
        """
        for name, token_ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    refuse(name, token_id, f"token ids below the vocabulary's size {vocab_size}")
        return self

    def _check_lengths(self) -> None:
        self._set("max_tokens", optional(as_integer, "max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT))
        most = MAX_TOKENS_LIMIT if self.max_tokens is None else self.max_tokens
        self._set("min_tokens", as_integer("min_tokens", self.min_tokens, 0, most))
        self._set("n", as_integer("n", self.n, 1, NUM_SAMPLES_LIMIT))
        self._set("seed", optional(as_integer, "seed", self.seed, 0, SEED_LIMIT))

    def _check_ends(self) -> None:
        longest = STOP_STRING_CHARACTERS_LIMIT
        self._set("stop", checks.strings("stop", self.stop, most=STOP_STRINGS_LIMIT, longest=longest))
        token_ids = checks.integers("stop_token_ids", self.stop_token_ids, most=STOP_TOKEN_IDS_LIMIT)
        self._set("stop_token_ids", token_ids)
        as_boolean("ignore_eos", self.ignore_eos)

    def _check_distribution(self) -> None:
        self._set("temperature", as_number_in("temperature", self.temperature, 0.0, 1e6))
        self._set("top_k", as_integer("top_k", self.top_k, 0, 2**31 - 1))
        self._set("top_p", as_number_in("top_p", self.top_p, 0.0, 1.0, above_low=True))
        self._set("min_p", as_number_in("min_p", self.min_p, 0.0, 1.0))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, as_number_in(name, getattr(self, name), -2.0, 2.0))
        penalty = as_number_in("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        self._set("repetition_penalty", penalty)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
