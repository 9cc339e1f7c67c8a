"""Checks prompts before anything is allocated for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pykv.errors import CapacityError, InvalidRequestError
from pykv.sampling.params import SamplingParams
from pykv.text.tokenizer import TextTokenizer

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
    listed: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)  # type: ignore[arg-type]
    if any(isinstance(prompt, (int, np.integer)) for prompt in listed):
        raise InvalidRequestError("prompts holds bare token ids; allowed: a sequence of prompts", "prompts")
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params or SamplingParams()) for prompt in listed]
    if len(params) != len(listed):
        raise InvalidRequestError(f"params has {len(params)} entries for {len(listed)} prompts", "params")
    return list(zip(listed, params, strict=True))


def encoded_prompt(
    prompt: Prompt, tokenizer: TextTokenizer | None, vocab_size: int, max_model_len: int
) -> npt.NDArray[np.int32]:
    """Returns the prompt as int32 [num_tokens], every id in [0, vocab_size).

    Raises:
        CapacityError: it is longer than any sequence may be; a long text is refused before it is encoded.
        InvalidRequestError: it is empty, no text or ids, or an id is not in the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequestError(
                "prompt is a text, but the engine has no tokenizer; send token ids", "prompt"
            )
        check_length(len(prompt), tokenizer, max_model_len)
        return checked_ids(tokenizer.encode(prompt), vocab_size, max_model_len)
    return checked_ids(prompt, vocab_size, max_model_len)


def check_length(num_characters: int, tokenizer: TextTokenizer, max_model_len: int) -> None:
    """Refuses a text that must have too many tokens, since no token stands for so many characters.

    Raises:
        CapacityError: it is too long.
    """
    least = -(-num_characters // tokenizer.longest_token_characters)
    if least > max_model_len:
        raise CapacityError(
            f"prompt has {num_characters} characters, so at least {least} tokens; allowed: {max_model_len}",
            "prompt",
        )


def checked_ids(token_ids: object, vocab_size: int, max_model_len: int) -> npt.NDArray[np.int32]:
    """Returns token ids as int32 [num_tokens].

    Raises:
        CapacityError, InvalidRequestError: see `encoded_prompt`.
    """
    if not isinstance(token_ids, (Sequence, np.ndarray)) or isinstance(token_ids, (bytes, str)):
        kind = type(token_ids).__name__
        raise InvalidRequestError(f"prompt is a {kind}; allowed: text, or a sequence of token ids", "prompt")
    if len(token_ids) == 0:
        raise InvalidRequestError("prompt is empty; allowed: at least one token", "prompt")
    if len(token_ids) > max_model_len:
        raise CapacityError(f"prompt has {len(token_ids)} tokens; allowed: {max_model_len}", "prompt")
    return _as_int32(token_ids, vocab_size)


def _as_int32(token_ids: object, vocab_size: int) -> npt.NDArray[np.int32]:
    allowed = f"integers from 0 to {vocab_size - 1}"
    try:
        ids = np.asarray(token_ids)
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(
            f"prompt holds something else than token ids; allowed: {allowed}", "prompt"
        ) from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequestError(f"prompt holds something else than token ids; allowed: {allowed}", "prompt")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        place = int(outside[0])
        raise InvalidRequestError(f"prompt[{place}] is {int(ids[place])}; allowed: {allowed}", "prompt")
    return ids.astype(np.int32)
