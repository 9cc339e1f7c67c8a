"""Checks prompts before anything is allocated for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt

from pykv.errors import CapacityError, InvalidRequestError
from pykv.field_checks import is_integer, refuse
from pykv.sampling.params import SamplingParams
from pykv.text.length import too_long
from pykv.text.tokenizer import TextTokenizer
from pykv.token_array import holds_bools

Prompt = str | Sequence[int] | npt.NDArray[np.integer]


def paired(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Iterable[tuple[Prompt, SamplingParams]]:
    """Returns each prompt with its parameters.

    Args:
        prompts: one text, or a sequence of prompts.
        params: one for all, one for each, or None for the defaults.

    Raises:
        InvalidRequestError: the numbers differ, or the prompts are bare token ids.
    """
    listed = _listed(prompts)
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params or SamplingParams()) for prompt in listed]
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        refuse("params", params, "a SamplingParams, or a sequence with one for each prompt")
    if len(params) != len(listed):
        raise InvalidRequestError(
            f"params has {len(params)} entries for {len(listed)} prompts: allowed is one for each", "params"
        )
    return list(zip(listed, params, strict=True))


def _listed(prompts: object) -> list[Prompt]:
    """The prompts, each to be looked at by itself."""
    if isinstance(prompts, str):
        return [prompts]
    is_scalar = isinstance(prompts, np.ndarray) and prompts.ndim == 0
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, Mapping, Set)) or is_scalar:
        refuse("prompts", prompts, "a text, or a sequence of prompts")
    listed = list(prompts)
    if any(map(is_integer, listed)):
        refuse("prompts", prompts, "a text, or a sequence of prompts; bare token ids are the inside of one")
    return listed


def encoded_prompt(
    prompt: Prompt, tokenizer: TextTokenizer | None, vocab_size: int, max_model_len: int
) -> npt.NDArray[np.int32]:
    """Returns the prompt as int32 [num_tokens], every id in [0, vocab_size).

    Raises:
        CapacityError: it is longer than any sequence may be; a text that is far too long, before all is encoded.
        InvalidRequestError: it is empty, no text or ids, or an id is not in the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequestError(
                "prompt is a text, but the engine has no tokenizer: allowed are token ids", "prompt"
            )
        check_length(len(prompt), tokenizer, max_model_len)
        return checked_encoding(tokenizer.encode(prompt, max_model_len), vocab_size, max_model_len)
    return checked_ids(prompt, vocab_size, max_model_len)


def check_length(num_characters: int, tokenizer: TextTokenizer, max_model_len: int) -> None:
    """Refuses a text that must have too many tokens, since no token stands for so many characters.

    Raises:
        CapacityError: it is too long.
    """
    least = -(-num_characters // tokenizer.longest_token_characters)
    if least >= max_model_len:
        raise too_long(f"{num_characters} characters, so at least {least} tokens", max_model_len)


def checked_encoding(token_ids: Sequence[int], vocab_size: int, max_model_len: int) -> npt.NDArray[np.int32]:
    """Returns the ids of an encoded text as int32 [num_tokens].

    Raises:
        CapacityError, InvalidRequestError: see `encoded_prompt`; the first says what was encoded in vain.
    """
    try:
        return checked_ids(token_ids, vocab_size, max_model_len)
    except CapacityError as error:
        error.num_encoded_tokens = len(token_ids)
        raise


def checked_ids(token_ids: object, vocab_size: int, max_model_len: int) -> npt.NDArray[np.int32]:
    """Returns token ids as int32 [num_tokens].

    Raises:
        CapacityError, InvalidRequestError: see `encoded_prompt`.
    """
    if not isinstance(token_ids, (Sequence, np.ndarray)) or isinstance(token_ids, (bytes, str)):
        refuse("prompt", token_ids, "a text, or a sequence of token ids")
    if isinstance(token_ids, np.ndarray) and token_ids.ndim != 1:
        raise InvalidRequestError(f"prompt has {token_ids.ndim} dimensions: allowed is one", "prompt")
    if len(token_ids) == 0:
        raise InvalidRequestError("prompt is empty: allowed is at least one token", "prompt")
    if len(token_ids) >= max_model_len:
        raise too_long(f"{len(token_ids)} tokens", max_model_len)
    return _as_int32(token_ids, vocab_size)


def _as_int32(token_ids: object, vocab_size: int) -> npt.NDArray[np.int32]:
    allowed = f"integers from 0 to {vocab_size - 1}"
    message = f"prompt holds something else than token ids: allowed are {allowed}"
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError, TypeError, RuntimeError) as error:
        raise InvalidRequestError(message, "prompt") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or holds_bools(token_ids):
        raise InvalidRequestError(message, "prompt")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        place = int(outside[0])
        raise InvalidRequestError(f"prompt[{place}] is {int(ids[place])}: allowed are {allowed}", "prompt")
    return ids.astype(np.int32)
