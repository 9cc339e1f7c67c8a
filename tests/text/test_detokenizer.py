"""Streamed decoding: nothing is lost, nothing ends inside a character."""

from __future__ import annotations

import random

import pytest

from pykv.text.detokenizer import ByteDetokenizer, WindowDetokenizer
from pykv.text.token_pieces import byte_level_pieces

FAMILY = "\U0001f468‍\U0001f469‍\U0001f467"
TEXTS = ["ďá삼겹살\U0001f642" + FAMILY, "\U0001f642" * 12, "plain", "a�b�", "é" * 40]


def streamed(detokenizer, token_ids):
    deltas = [detokenizer.push(token_id) for token_id in token_ids]
    return [*deltas, detokenizer.flush()]


@pytest.fixture(scope="module")
def pieces(make_byte_backend):
    found = byte_level_pieces(make_byte_backend())
    assert found is not None
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_one_by_one_give_the_text_in_whole_characters(pieces, text):
    deltas = streamed(ByteDetokenizer(pieces), text.encode())
    assert "".join(deltas) == text
    assert all(len(delta) <= 1 for delta in deltas)
    assert deltas[-1] == ""


@pytest.mark.parametrize("text", TEXTS)
def test_byte_fallback_gives_the_text(make_fallback_backend, text):
    backend = make_fallback_backend()
    token_ids = [byte + 1 for byte in text.encode()]
    deltas = streamed(WindowDetokenizer(backend), token_ids)
    assert "".join(deltas) == text


def test_a_genuine_replacement_character_passes_at_once(pieces):
    detokenizer = ByteDetokenizer(pieces)
    assert [detokenizer.push(byte) for byte in "�".encode()] == ["", "", "�"]


def test_a_broken_character_becomes_a_replacement_before_the_text_after_it(pieces):
    assert "".join(streamed(ByteDetokenizer(pieces), [0xE2, ord("a")])) == "�a"


def test_the_end_flushes_an_unfinished_character(pieces):
    assert streamed(ByteDetokenizer(pieces), [ord("a"), 0xF0, 0x9F]) == ["a", "", "", "�"]


def test_bytes_that_are_no_text_are_replaced_and_not_held_for_ever(pieces, make_fallback_backend):
    garbage = [0xFF, 0xFE, 0x80] * 100
    deltas = streamed(ByteDetokenizer(pieces), garbage)
    assert "".join(deltas) == bytes(garbage).decode("utf-8", "replace")
    window = WindowDetokenizer(make_fallback_backend())
    released = [window.push(byte + 1) for byte in garbage]
    assert len("".join(released)) > 250


def test_special_and_unknown_ids_have_no_text(pieces):
    detokenizer = ByteDetokenizer(pieces)
    assert [detokenizer.push(token_id) for token_id in (256, 258, 100_000)] == ["", "", ""]


def test_random_bytes_stream_as_they_decode_at_once(pieces):
    source = random.Random(5)
    for _ in range(200):
        raw = bytes(source.choice([0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF]) for _ in range(30))
        assert "".join(streamed(ByteDetokenizer(pieces), raw)) == raw.decode("utf-8", "replace")


def test_words_stream_as_they_decode_at_once(make_fallback_backend):
    backend = make_fallback_backend()
    token_ids = backend.encode("a b é a").ids
    assert "".join(streamed(WindowDetokenizer(backend), token_ids)) == backend.decode(token_ids) == "a b é a"


def test_a_continuation_keeps_its_leading_space(make_fallback_backend):
    backend = make_fallback_backend()
    detokenizer = WindowDetokenizer(backend, backend.encode("a").ids)
    assert detokenizer.push(backend.token_to_id("▁Paris")) == " Paris"
