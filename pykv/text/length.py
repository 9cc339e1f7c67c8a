"""Refuses texts that have too many tokens, and those that have far too many before all of them is encoded."""

from __future__ import annotations

from tokenizers import Tokenizer

from pykv.errors import CapacityError

__all__ = ["check_pieces", "too_long"]

FITTING_BYTES = 6
"""Few texts that fit have more bytes a token; those, and what does not fit, are counted before they are encoded."""
PIECE_CHARACTERS = 2**14
FAR = 2


def too_long(length: str, max_model_len: int, *, num_encoded_tokens: int = 0) -> CapacityError:
    """The refusal of a prompt; a sequence needs room for one token of output."""
    allowed = f"at most {max_model_len - 1}, as prompt and output may have {max_model_len} tokens together"
    message = f"prompt has {length}: allowed is {allowed}"
    return CapacityError(message, "prompt", num_encoded_tokens=num_encoded_tokens)


def check_pieces(backend: Tokenizer, text: str, num_bytes: int, max_model_len: int) -> None:
    """Refuses a text of which a part alone has far too many tokens: what is encoded takes some 150 bytes a token.

    The text is counted in pieces that begin at spaces where there are some. They may have some tokens more than the
    same text in one, but not FAR times as many: unless nearly all of it is blanks beside a control token that takes
    them, however many they are, or characters that the tokenizer drops or takes for one unknown token.

    Args:
        num_bytes: of the text in UTF-8.

    Raises:
        CapacityError: it is too long.
    """
    if len(text) <= PIECE_CHARACTERS or num_bytes <= FITTING_BYTES * max_model_len:
        return
    start = num_tokens = 0
    while start < len(text):
        end = start + PIECE_CHARACTERS
        space = text.rfind(" ", start + 1, end) if end < len(text) else -1
        end = end if space < 0 else space
        (encoding,) = backend.encode_batch_fast([text[start:end]], add_special_tokens=False)
        num_tokens += len(encoding)
        if num_tokens > FAR * max_model_len:
            length = (
                f"{len(text)} characters, of which the first {min(end, len(text))} have {num_tokens} tokens"
            )
            raise too_long(length, max_model_len, num_encoded_tokens=num_tokens)
        start = end
