"""Texts that are far too long are refused after a part of them; those that fit never are."""

import random

import pytest
from transformers import AutoTokenizer

from pykv.errors import CapacityError
from pykv.models.sources import find_checkpoint
from pykv.text import length
from pykv.text.tokenizer import TextTokenizer

PARTS = [
    "a",
    "살",
    "🙂",
    "the quick brown fox",
    "\n\n",
    "    ",
    " Paris",
    "x" * 300,
    "12345",
    "é",
    "<|im_end|>",
]


@pytest.fixture
def tokenizer(byte_tokenizer):
    return TextTokenizer(byte_tokenizer)


@pytest.fixture(scope="module", params=["bytes", "fallback", "bundled"])
def every_tokenizer(request, make_byte_backend, make_fallback_backend):
    if request.param == "bundled":
        checkpoint = find_checkpoint("bundled", print)
        return TextTokenizer(AutoTokenizer.from_pretrained(checkpoint.location, local_files_only=True))
    return TextTokenizer({"bytes": make_byte_backend, "fallback": make_fallback_backend}[request.param]())


def test_a_text_that_is_far_too_long_is_refused_after_a_part_of_it(tokenizer):
    with pytest.raises(
        CapacityError, match=r"prompt has 1000000 characters, of which the first \d+ have"
    ) as caught:
        tokenizer.encode("🙂" * 1_000_000, 1000)
    assert caught.value.field == "prompt"
    assert 2000 < caught.value.num_encoded_tokens <= 2000 + 4 * length.PIECE_CHARACTERS


def test_a_chat_that_is_far_too_long_is_refused_after_a_part_of_it(tokenizer):
    message = {"role": "user", "content": "a " * 500_000}
    with pytest.raises(CapacityError) as caught:
        tokenizer.encode_chat([message], max_model_len=1000)
    assert 2000 < caught.value.num_encoded_tokens <= 2000 + length.PIECE_CHARACTERS


@pytest.mark.parametrize("seed", range(20))
def test_a_text_that_fits_has_the_ids_that_it_has_without_a_limit(every_tokenizer, monkeypatch, seed):
    """At the very limit, and with pieces of which a text has many."""
    monkeypatch.setattr(length, "FITTING_BYTES", 0)
    monkeypatch.setattr(length, "PIECE_CHARACTERS", 512)
    source = random.Random(seed)
    parts = source.choices(PARTS, k=source.randint(1, 4))
    text = "".join(source.choices(parts, k=1000))
    token_ids = every_tokenizer.encode(text)
    assert every_tokenizer.encode(text, len(token_ids)) == token_ids
    with pytest.raises(CapacityError):
        every_tokenizer.encode(text, len(token_ids) // 3)
