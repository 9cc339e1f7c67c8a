"""Small tokenizers: a byte-level one without merges, and one that falls back to bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pykv.text.token_pieces import _byte_of_character

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\n' }}"
)


def byte_backend() -> Tokenizer:
    """One token a byte, id = byte; control tokens from 256 on; adds BOS."""
    vocabulary = dict(_byte_of_character())
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<s>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def fallback_backend() -> Tokenizer:
    """Words with U+2581 for the space before them, other characters as bytes `<0xXX>`."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁b", "a", "b", "▁Paris"]
    merges = [("▁", "a"), ("▁", "b")]
    model = models.BPE(
        vocab={word: index for index, word in enumerate(words)},
        merges=merges,
        byte_fallback=True,
        unk_token="<unk>",
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of transformers with a chat template whose text begins with BOS."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_backend(), bos_token="<s>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def make_byte_backend() -> Callable[[], Tokenizer]:
    return byte_backend


@pytest.fixture(scope="session")
def make_fallback_backend() -> Callable[[], Tokenizer]:
    return fallback_backend
