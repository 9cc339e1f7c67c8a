"""One model's tokenizer, safe for any number of threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import NoneType
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer, models

from pykv.errors import InvalidRequestError, ModelError
from pykv.field_checks import refuse
from pykv.text.chat import checked_messages
from pykv.text.control_tokens import ControlTokens
from pykv.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from pykv.text.length import check_pieces
from pykv.text.token_pieces import Piece, byte_level_pieces

CACHED_WORDS = 4000


class TextTokenizer:
    """Encodes and decodes with a private copy of a tokenizer, which nothing changes after construction.

    The copy neither truncates nor pads, whatever others set on the tokenizer that was given.

    Args:
        tokenizer: a fast tokenizer of transformers, or one of the package tokenizers (without chat template).

    Raises:
        ModelError: it is neither.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._source = tokenizer
        self._backend = _private_copy(tokenizer)
        self._control_tokens = ControlTokens(self._backend)
        bos_token = getattr(tokenizer, "bos_token", None)
        self._bos_token: str | None = bos_token
        self._bos_id = None if bos_token is None else self._backend.token_to_id(bos_token)

    @cached_property
    def longest_token_characters(self) -> int:
        """No token stands for more characters: a text has at least its length over this many tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, max_model_len: int | None = None) -> list[int]:
        """Returns the ids of a raw prompt.

        Control tokens in it are read as such, and special tokens are added as the tokenizer is set up to do,
        but no second BOS where the text begins with one.

        Args:
            max_model_len: what a sequence may have; None = any number of tokens.

        Raises:
            CapacityError: the text has far more tokens; only a part of it was encoded.
            InvalidRequestError: the text holds a lone surrogate.
        """
        token_ids = self._encode("prompt", text, max_model_len, add_special_tokens=True)
        begins_with_bos = self._bos_token is not None and text.startswith(self._bos_token)
        if begins_with_bos and token_ids[:2] == [self._bos_id, self._bos_id]:
            return token_ids[1:]
        return token_ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        template_options: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
    ) -> list[int]:
        """Returns the ids of the model's chat template over the messages, up to where the answer begins.

        The template alone brings BOS and control tokens: those that a message spells stay text.

        Args:
            messages: each with `role` and `content`.
            template_options: more variables for the template.
            max_model_len: as for `encode`.

        Raises:
            CapacityError: as from `encode`.
            InvalidRequestError: the messages are malformed, the template refuses them, or there is none.
        """
        defuse = self._control_tokens.defuse
        defused = [
            {**message, "content": defuse(message["content"])} for message in checked_messages(messages)
        ]
        if not isinstance(template_options, (Mapping, NoneType)):
            refuse("template_options", template_options, "a mapping of more variables for the template")
        text = self._rendered(defused, template_options or {})
        token_ids = self._encode("messages", text, max_model_len, add_special_tokens=False)
        return self._control_tokens.drop_marks(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of whole sequences of tokens, without special tokens."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        """Returns a new streamed decoder of what follows the prompt."""
        if self._pieces is not None:
            return ByteDetokenizer(self._pieces)
        return WindowDetokenizer(self._backend, prompt_token_ids)

    @cached_property
    def _pieces(self) -> list[Piece] | None:
        return byte_level_pieces(self._backend)

    def _encode(
        self, field: str, text: str, max_model_len: int | None, *, add_special_tokens: bool
    ) -> list[int]:
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            message = f"{field} has a lone surrogate at character {error.start}: allowed is Unicode text"
            raise InvalidRequestError(message, field) from error
        if max_model_len is not None:
            check_pieces(self._backend, text, num_bytes, max_model_len)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids  # `encode` would hold the interpreter, and with it all other threads, for seconds

    def _rendered(self, messages: list[dict[str, str]], options: Mapping[str, Any]) -> str:
        if not getattr(self._source, "chat_template", None):
            raise InvalidRequestError("messages: the model has no chat template; send a prompt", "messages")
        try:
            text = self._source.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        except (TemplateError, ValueError, TypeError) as error:
            message = f"messages: the model's chat template refuses them: {str(error)[:200]}"
            raise InvalidRequestError(message, "messages") from error
        return str(text)


def _private_copy(tokenizer: Any) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        refuse("tokenizer", tokenizer, "one with a fast backend", ModelError)
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    _bound_cache(copy)
    return copy


def _bound_cache(backend: Tokenizer) -> None:
    """Bounds what each thread that encodes keeps of the words that it met: a long one takes up to 8 KiB.

    By default those would be 10 000 words, 80 MiB a thread, which prompts made for that fill. Text is encoded as fast
    with CACHED_WORDS. Models that look words up keep none.
    """
    if isinstance(backend.model, models.BPE | models.Unigram):
        backend.model._resize_cache(CACHED_WORDS)
