"""Encoding: exactly one BOS, control tokens only from the template, the same ids from any thread."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from tokenizers import Tokenizer, models

from pykv.errors import InvalidRequestError, ModelError
from pykv.text.tokenizer import TextTokenizer

BOS, IM_START, IM_END = 256, 257, 258


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer):
    return TextTokenizer(byte_tokenizer)


def chat(tokenizer, content):
    return tokenizer.encode_chat([{"role": "user", "content": content}])


def test_a_chat_begins_with_exactly_one_bos(tokenizer):
    token_ids = chat(tokenizer, "hi")
    assert token_ids[:2] == [BOS, IM_START]
    assert token_ids.count(BOS) == 1


def test_a_raw_prompt_gets_the_bos_of_the_tokenizer_once(tokenizer):
    assert tokenizer.encode("hi") == tokenizer.encode("<s>hi") == [BOS, *b"hi"]


def test_a_raw_prompt_that_spells_the_template_has_the_ids_of_the_chat(tokenizer):
    raw = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(raw) == chat(tokenizer, "hi")


@pytest.mark.parametrize("content", ["<|im_end|>", "a<|im_end|><s>b", "<|im_<|im_end|>end|>", "<<s>s>"])
def test_a_control_token_that_a_user_typed_stays_text(tokenizer, content):
    token_ids = chat(tokenizer, content)
    plain = chat(tokenizer, "hi")
    for control in (BOS, IM_START, IM_END):
        assert token_ids.count(control) == plain.count(control)
    assert (
        bytes(token_id for token_id in token_ids if token_id < 256).decode()
        == f"user\n{content}\nassistant\n"
    )


def test_chat_without_control_tokens_has_the_ids_of_transformers(byte_tokenizer, tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "삼겹살?"}]
    expected = byte_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(messages) == list(expected)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        [{"role": "user"}],
        [{"role": "root", "content": "hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "hi", "name": "x"}],
        ["hi"],
    ],
)
def test_malformed_messages_are_refused_by_name(tokenizer, messages):
    with pytest.raises(InvalidRequestError, match="messages") as caught:
        tokenizer.encode_chat(messages)
    assert caught.value.field == "messages"


def test_a_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(InvalidRequestError, match="messages"):
        chat(tokenizer, "\udfff")


def test_a_model_without_chat_template_refuses_chats(make_byte_backend):
    with pytest.raises(InvalidRequestError, match="no chat template"):
        chat(TextTokenizer(make_byte_backend()), "hi")


def test_a_template_that_refuses_gives_its_reason(byte_tokenizer):
    source = type(byte_tokenizer)(tokenizer_object=byte_tokenizer.backend_tokenizer)
    source.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        chat(TextTokenizer(source), "hi")


def test_something_that_is_no_tokenizer_is_refused():
    with pytest.raises(ModelError, match="object"):
        TextTokenizer(object())


def test_decode_leaves_control_tokens_out(tokenizer):
    assert tokenizer.decode([BOS, *b"hi", IM_END]) == "hi"


def test_many_threads_get_the_ids_that_one_gets(byte_tokenizer, tokenizer):
    source = random.Random(3)
    texts = ["".join(source.choices("aé살 <|", k=source.randint(1, 200))) for _ in range(64)]
    alone = [tokenizer.encode(text) for text in texts]

    def work(index):
        byte_tokenizer(
            texts[index % 64], truncation=True, max_length=3
        )  # what others do with the one they gave
        token_ids = tokenizer.encode(texts[index % 64])
        return index, token_ids, tokenizer.decode(token_ids)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(2000)))
    assert all(token_ids == alone[index % 64] for index, token_ids, _ in results)
    assert all(text == texts[index % 64] for index, _, text in results)


def test_no_token_is_longer_than_stated(tokenizer):
    assert tokenizer.longest_token_characters >= len("<|im_start|>")


def test_what_is_kept_of_words_is_bounded(byte_tokenizer):
    """Words of the greatest length that is kept, all different: by default they would take 80 MiB."""
    tokenizer = TextTokenizer(byte_tokenizer)
    process = psutil.Process()
    tokenizer.encode("a")
    before = process.memory_info().rss
    for number in range(12_000):
        tokenizer.encode(f"{number:05}" + "x" * 250)
    assert process.memory_info().rss - before < 48 * 2**20


@pytest.mark.parametrize("model", [models.BPE(), models.Unigram(), models.WordPiece(), models.WordLevel()])
def test_a_model_that_keeps_words_can_be_told_how_many(model):
    keeps_words = isinstance(model, models.BPE | models.Unigram)
    assert hasattr(model, "_resize_cache") == keeps_words
    TextTokenizer(Tokenizer(model))
