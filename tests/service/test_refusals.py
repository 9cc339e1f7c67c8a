"""Bad input gets one clear error, at once, and no other stream notices."""

import asyncio
import time

import pytest
from timing import assert_below

from pykv.engine.outputs import OutputDelta, Usage
from pykv.errors import CapacityError, DuplicateRequestError, InvalidRequestError, QueueFullError
from pykv.sampling import SamplingParams
from pykv.service.client.failures import ServiceError
from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

GENERATE = "/pykv.v1.Engine/Generate"
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 3, 8, 12


def with_ids(*ids):
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))


async def test_a_bad_request_is_refused_by_field_and_others_go_on(bad_request, raw, framed, client, engine):
    request, field = bad_request
    other = client.generate([5], SamplingParams(max_tokens=50), request_id="other")
    first = await anext(other)
    stream_id = await raw.send(GENERATE, framed(request))
    status, message = await raw.status(stream_id)
    assert status == INVALID_ARGUMENT
    assert field in message
    assert len(message) < 1000
    rest = [token async for delta in other for token in delta.token_ids]
    assert [*first.token_ids, *rest] == list(range(6, 56))
    assert set(engine.finished) == {"other"}
    assert await client.health() == "SERVING"


async def test_a_refusal_does_not_repeat_the_prompt(client):
    with pytest.raises(InvalidRequestError) as refusal:
        await anext(client.generate("secret " * 10, SamplingParams(), request_id="secret " * 1000))
    assert "secret" not in str(refusal.value)


async def test_the_client_raises_what_the_server_raised_with_its_field(client):
    with pytest.raises(CapacityError, match="200000 tokens") as refusal:
        await anext(client.generate([1] * 200_000))
    assert refusal.value.field == "prompt"


async def test_a_name_in_use_is_refused_and_its_bearer_goes_on(client, engine):
    first = client.generate([5], SamplingParams(max_tokens=100), request_id="x")
    await anext(first)
    with pytest.raises(DuplicateRequestError):
        await anext(client.generate([5], request_id="x"))
    assert len([delta async for delta in first]) > 0
    assert engine.finished == ["x"]


async def _outcome(task):
    try:
        return await task
    except QueueFullError as error:
        return error


async def test_a_full_queue_refuses_and_then_takes_requests_again(client, engine, collect):
    engine.num_running_max = 8
    engine.hold()
    short = SamplingParams(max_tokens=2)
    streams = [asyncio.create_task(collect(client.generate([5], short))) for _ in range(100)]
    for place, ended in enumerate(asyncio.as_completed(streams), start=1):
        await _outcome(ended)
        if place == 92:
            assert len(engine.live) == 8
            engine.release()
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert sum(isinstance(result, QueueFullError) for result in results) == 92
    assert len(await collect(client.generate([5], SamplingParams(max_tokens=2)))) > 0


async def test_one_failing_sequence_fails_its_own_call_alone(client, engine, collect):
    failed = OutputDelta(
        "x", 0, (), "", finish_reason="error", error="NaN logits", usage=Usage(1, 0, 0, 0, 0)
    )
    engine.scripts["bad"] = [OutputDelta("x", 0, (1,), "a"), failed]
    other = asyncio.create_task(collect(client.generate([5], SamplingParams(max_tokens=50))))
    stream, seen = client.generate("bad"), []
    with pytest.raises(ServiceError, match="NaN logits") as failure:
        await collect(_remembered(stream, seen))
    assert failure.value.status == "INTERNAL"
    assert seen[-1].finish_reason == "error"
    assert seen[-1].error == "NaN logits"
    assert (await other)[-1].finish_reason == "length"


async def _remembered(stream, seen):
    async for delta in stream:
        seen.append(delta)
        yield delta


async def test_an_unforeseen_error_tells_the_client_nothing_of_itself(client, engine):
    engine.scripts["bug"] = [ValueError("the prompt was: secret")]
    with pytest.raises(ServiceError) as failure:
        await anext(client.generate("bug"))
    assert failure.value.status == "INTERNAL"
    assert "secret" not in str(failure.value)


async def test_an_error_with_odd_characters_does_not_break_the_trailers(client, engine):
    engine.scripts["odd"] = [InvalidRequestError("prompt is '\ud800\n\x00é'" + "x" * 10_000, "prompt")]
    with pytest.raises(InvalidRequestError, match="prompt is") as refusal:
        await anext(client.generate("odd"))
    assert len(str(refusal.value)) <= 300


async def test_bytes_that_are_no_message_are_refused(raw, framed):
    bad_text = b"\x12\x03\xff\xfe\x80"  # field 2, a text of three bytes that are not UTF-8
    for data in (bad_text, b"\xff" * 20):
        stream_id = raw.request(GENERATE, framed(data))
        await raw.flush()
        status, message = await raw.status(stream_id)
        assert (status, "GenerateRequest" in message) == (INVALID_ARGUMENT, True)


async def test_a_message_over_the_limit_is_refused_by_its_length(raw, framed, daemon):
    for length in (16 * 2**20 + 1, 2**32 - 1):
        stream_id = raw.request(GENERATE, framed(b"x" * 100, length=length), end_stream=False)
        await raw.flush()
        status, message = await raw.status(stream_id)
        assert status == RESOURCE_EXHAUSTED
        assert str(length) in message


async def test_a_message_cut_short_is_refused(raw, framed):
    for data in (framed(b"x" * 10, length=100), framed(b"", length=100), b"\x00\x00"):
        stream_id = raw.request(GENERATE, data)
        await raw.flush()
        assert (await raw.status(stream_id))[0] == INVALID_ARGUMENT


async def test_a_call_without_a_message_is_refused(raw):
    stream_id = raw.request(GENERATE)
    await raw.flush()
    assert (await raw.status(stream_id))[0] == INVALID_ARGUMENT


@pytest.mark.parametrize("method", ["Generate", "Abort"])
async def test_a_call_with_two_messages_is_refused(raw, framed, engine, method):
    message = with_ids(5) if method == "Generate" else pb.AbortRequest(request_id="x")
    stream_id = raw.request(f"/pykv.v1.Engine/{method}", framed(message) * 2)
    await raw.flush()
    status, text = await raw.status(stream_id)
    assert (status, "several request messages" in text) == (INVALID_ARGUMENT, True)
    assert not engine.scopes


async def test_a_compressed_message_is_refused_by_name(raw, framed):
    stream_id = raw.request(GENERATE, framed(with_ids(1), is_compressed=True))
    await raw.flush()
    status, message = await raw.status(stream_id)
    assert (status, "compressed" in message) == (UNIMPLEMENTED, True)


async def test_an_unknown_method_is_unimplemented(raw, framed):
    stream_id = raw.request("/pykv.v1.Engine/Unknown", framed(b""))
    await raw.flush()
    assert (await raw.status(stream_id))[0] == UNIMPLEMENTED


async def test_a_prompt_of_5_mb_is_refused_and_nobody_waits_for_it(client):
    async def refused():
        with pytest.raises(CapacityError):
            await anext(client.generate("a " * 2_500_000))

    async def longest_gap():
        gaps = []
        huge = asyncio.create_task(refused())
        while not huge.done():
            start = time.thread_time()  # of the loop's own work: other processes may be busy
            assert await client.health() == "SERVING"
            await anext(other)
            gaps.append(time.thread_time() - start)
        await huge
        assert len(gaps) > 1
        return max(gaps)

    other = client.generate([5], SamplingParams(max_tokens=100_000))
    await anext(other)
    await assert_below(0.2, longest_gap)
    await other.aclose()
