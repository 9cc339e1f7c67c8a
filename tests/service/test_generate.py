"""Tokens stream from the engine to the client, whole and in order."""

import asyncio

import pytest

from pykv.engine.outputs import OutputDelta, TokenLogprobs, Usage
from pykv.sampling import SamplingParams
from pykv.service.messages import PROMPT_LOGPROBS_A_MESSAGE, responses_of

pytestmark = pytest.mark.asyncio


def joined(deltas, index=0):
    mine = [delta for delta in deltas if delta.index == index]
    return [token for delta in mine for token in delta.token_ids], "".join(delta.text for delta in mine)


def stopped(text, stop_reason=None):
    usage = Usage(1, 0, 1, 0, 0)
    return OutputDelta("x", 0, (1,), text, finish_reason="stop", stop_reason=stop_reason, usage=usage)


async def test_token_ids_and_text_arrive_whole_and_in_order(client, collect):
    deltas = await collect(client.generate([5, 6], SamplingParams(max_tokens=40)))
    assert joined(deltas) == (list(range(7, 47)), "".join(f"{token} " for token in range(7, 47)))


async def test_the_last_delta_says_why_it_ended_and_what_it_took(client, collect):
    deltas = await collect(client.generate([5, 6], SamplingParams(max_tokens=4)))
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert deltas[-1].usage == Usage(2, 0, 4, 0, 0)
    assert all(delta.usage is None for delta in deltas[:-1])


async def test_a_request_without_a_name_gets_one(client, collect):
    deltas = await collect(client.generate([5], SamplingParams(max_tokens=3)))
    names = {delta.request_id for delta in deltas}
    assert len(names) == 1
    assert len(names.pop()) == 32


async def test_a_request_keeps_the_name_and_the_salt_that_it_has(client, engine, collect):
    deltas = await collect(
        client.generate([5], SamplingParams(max_tokens=2), request_id="mine", cache_salt=b"tenant")
    )
    assert {delta.request_id for delta in deltas} == {"mine"}
    assert engine.scopes == {"mine": b"tenant"}


async def test_every_sequence_of_n_streams_to_its_end_under_its_index(client, collect):
    deltas = await collect(client.generate([5], SamplingParams(max_tokens=6, n=3)))
    assert [joined(deltas, index)[0] for index in range(3)] == [list(range(6 + i, 12 + i)) for i in range(3)]
    assert [delta.index for delta in deltas if delta.finish_reason == "length"] == [0, 1, 2]


async def test_logprobs_come_with_their_tokens(client, collect):
    deltas = await collect(
        client.generate([5, 6, 7], SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1))
    )
    logprobs = [entry for delta in deltas for entry in delta.logprobs]
    assert [(entry.token_id, entry.top_token_ids, entry.top_logprobs) for entry in logprobs] == [
        (8, (0, 1), (-1.0, -2.0)),
        (9, (0, 1), (-1.0, -2.0)),
    ]
    assert [delta.prompt_token_ids for delta in deltas] == [(5, 6, 7), None]
    of_prompt = deltas[0].prompt_logprobs
    assert of_prompt[0] is None
    assert [entry.token_id for entry in of_prompt[1:]] == [6, 7]


async def test_a_long_prompts_logprobs_come_in_parts_and_arrive_as_one(client, collect):
    prompt = [7] * (3 * PROMPT_LOGPROBS_A_MESSAGE + 5)
    deltas = await collect(client.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    assert [len(delta.prompt_logprobs or ()) for delta in deltas] == [len(prompt)]


async def test_a_prompts_logprobs_without_its_tokens_are_not_dropped_without_a_word():
    delta = OutputDelta("x", 0, (1,), "a", prompt_logprobs=(None, TokenLogprobs(5, -1.0, 1)))
    with pytest.raises(ValueError, match="zip"):
        list(responses_of(delta, "x"))


async def test_a_chat_is_answered(client, collect):
    messages = [{"role": "system", "content": "count"}, {"role": "user", "content": "four"}]
    deltas = await collect(client.chat(messages, SamplingParams(max_tokens=3)))
    assert joined(deltas)[1] == "5 6 7 "


async def test_a_text_prompt_reaches_the_engine(client, collect):
    deltas = await collect(client.generate("to be", SamplingParams(max_tokens=1)))
    assert joined(deltas)[0] == [3]


async def test_streams_of_one_connection_do_not_mix(client, collect):
    streams = [collect(client.generate([start], SamplingParams(max_tokens=20))) for start in range(0, 600, 3)]
    results = await asyncio.gather(*streams)
    assert [joined(deltas)[0] for deltas in results] == [
        list(range(start + 1, start + 21)) for start in range(0, 600, 3)
    ]


async def test_a_stop_text_and_a_stop_token_are_told_apart(client, engine, collect):
    for name, reason in (("text", "\n"), ("token", 7), ("end", None)):
        engine.scripts[name] = [stopped("a", stop_reason=reason)]
    ends = [(await collect(client.generate(name)))[-1].stop_reason for name in ("text", "token", "end")]
    assert ends == ["\n", 7, None]


async def test_text_that_no_utf8_can_carry_is_replaced(client, engine, collect):
    engine.scripts["odd"] = [stopped("a\ud800é")]
    assert joined(await collect(client.generate("odd")))[1] == "a?é"


async def test_abort_ends_the_stream_with_its_reason(client, engine):
    deltas = client.generate([5], SamplingParams(max_tokens=100_000), request_id="long")
    await anext(deltas)
    assert await client.abort("long")
    last = [delta async for delta in deltas][-1]
    assert last.finish_reason == "abort"
    assert not engine.live


async def test_abort_of_an_unknown_request_says_so(client):
    assert not await client.abort("nobody")


async def test_the_model_is_described(client, description):
    assert await client.get_model() == description


async def test_counts_are_those_of_the_engine(client, engine):
    engine.hold()
    stream = client.generate([5])
    waiting = asyncio.create_task(anext(stream))
    await engine.until(lambda: engine.live)
    counts = await client.get_stats()
    assert (counts["num_running"], counts["blocks_free"], counts["blocks_total"]) == (1, 999, 1000)
    engine.release()
    await waiting
    await stream.aclose()
