"""A tenant's bucket of tokens: what requests reserve, use and give back, and when they are refused."""

import asyncio
import hashlib
from dataclasses import replace

import pytest

from pykv.client import Client, ServiceError
from pykv.engine.delta_stream import DeltaStream
from pykv.errors import CapacityError
from pykv.sampling import SamplingParams
from pykv.service.access import Tenant
from pykv.service.access.account import Account
from pykv.service.bill import MostTokens
from pykv.service.caller import Caller
from pykv.service.errors import TenantLimitError

SHORT = SamplingParams(max_tokens=3, temperature=0)
LONG = SamplingParams(max_tokens=100_000)


class Bucket:
    """An account with its own time."""

    def __init__(self, rate, burst):
        self.now = 0.0
        tenant = Tenant(name="t", certificates=("c",), tokens_per_second=rate, burst_tokens=burst)
        self.account = Account(tenant, lambda: self.now)
        self.open = []

    def begin(self, most):
        """A request begins and goes on: what it reserved."""
        reservation = self.account.reserve(most)
        self.open.append(reservation)
        return reservation

    def end(self, index=-1):
        """A request ends."""
        self.open.pop(index).end()

    def refusal(self):
        """When the next request may come, where it is refused."""
        with pytest.raises(TenantLimitError) as refusal:
            self.begin(1)
        return refusal.value.retry_seconds


@pytest.fixture
def make_bucket():
    return Bucket


def test_a_bucket_fills_at_its_rate_and_can_owe(make_bucket):
    bucket = make_bucket(10.0, 20.0)
    bucket.begin(30).use(50)
    bucket.end()
    assert bucket.refusal() == pytest.approx(3.1)
    bucket.now += 3.1
    bucket.begin(1)
    bucket.end()
    bucket.now += 1000.0
    bucket.begin(20).use(20)  # it holds no more than the burst
    bucket.end()
    assert bucket.refusal() == pytest.approx(0.1)


def test_what_was_not_used_is_given_back_and_use_comes_out_of_what_was_reserved(make_bucket):
    bucket = make_bucket(10.0, 100.0)
    first = bucket.begin(60)
    first.use(20)
    bucket.begin(60).use(60)  # 100 - 60 is left for it to begin with
    bucket.refusal()
    bucket.end()
    bucket.end()
    bucket.begin(1).use(20)  # 80 were used, so 20 are left
    bucket.end()
    assert bucket.refusal() == pytest.approx(0.1)


def test_a_request_of_unknown_length_empties_a_bucket_and_no_more(make_bucket):
    bucket = make_bucket(10.0, 100.0)
    bucket.begin(10**9)
    bucket.refusal()
    bucket.end()
    bucket.begin(1)


@pytest.mark.parametrize("most", [1, 7, 104, 199, 200, 10**6])
def test_many_at_once_take_no_more_than_one_burst_too_much(make_bucket, most):
    bucket = make_bucket(100.0, 200.0)
    begun = []
    for _ in range(300):
        try:
            begun.append(bucket.begin(most))
        except TenantLimitError:
            break
    num_reserved = sum(min(most, 200) for _ in begun)
    assert 200 <= num_reserved < 400
    for reservation in begun:
        reservation.use(min(most, 200))
        bucket.end()
    assert bucket.refusal() == pytest.approx((1 + num_reserved - 200) / 100)


@pytest.mark.parametrize(
    ("reserved", "used", "seconds"),
    [
        (100, 0, 1.0),  # full and all reserved: it waits for a request to end, and fills no further
        (60, 60, None),
        (100, 90, 0.1),  # what was used comes again
        (200, 150, 5.1),  # it owes 50
    ],
)
def test_the_hint_counts_what_was_used_and_not_what_is_reserved(make_bucket, reserved, used, seconds):
    bucket = make_bucket(10.0, 100.0)
    bucket.begin(reserved).use(used)
    if seconds is None:
        bucket.begin(1)
    else:
        assert bucket.refusal() == pytest.approx(seconds)


@pytest.mark.asyncio
async def test_calls_that_take_no_tokens_need_none_that_are_not_reserved(make_bucket):
    bucket = make_bucket(10.0, 100.0)
    reservation = bucket.begin(1000)
    with bucket.account.call():
        pass
    with (
        pytest.raises(TenantLimitError, match="may use all that is left"),
        bucket.account.call(takes_tokens=True),
    ):
        pass
    reservation.use(100)
    with pytest.raises(TenantLimitError, match="has used more"), bucket.account.call():
        pass
    assert bucket.account.num_in_flight == 0


@pytest.mark.parametrize(
    ("estimate", "params", "prompt", "in_all"),
    [
        (100, SamplingParams(max_tokens=50), 100, 150),
        (100, SamplingParams(max_tokens=50, n=3), 100, 250),
        (100, SamplingParams(), 100, 1000),
        (100, SamplingParams(n=2), 100, 1900),
        (100, SamplingParams(max_tokens=5000), 100, 1000),
        (10**6, SamplingParams(max_tokens=5), 1000, 1000),
    ],
)
def test_a_request_may_take_its_prompt_and_all_samples_within_the_context_cap(
    estimate, params, prompt, in_all
):
    assert MostTokens.of(estimate, params, 1000) == MostTokens(prompt, in_all, 1000, params.n)


@pytest.fixture
def start_for_tenant(start_daemon, tmp_path):
    """A daemon for one tenant, whose token is "t": `await start_for_tenant(engine=None, **limits)`."""

    async def start(engine=None, description=None, **limits):
        path = tmp_path / "tenants.toml"
        lines = "".join(f"\n{name} = {value}" for name, value in limits.items())
        path.write_text(f'[tenants.t]\ntoken_sha256 = ["{hashlib.sha256(b"t").hexdigest()}"]{lines}')
        return await start_daemon(engine, description, tenants=str(path))

    return start


@pytest.mark.asyncio
async def test_a_burst_of_calls_is_bounded_before_any_of_them_has_ended(start_for_tenant):
    daemon = await start_for_tenant(tokens_per_second=1, burst_tokens=200)
    daemon.engine.hold()
    async with Client(daemon.address, token="t") as client:

        async def call():
            return [delta async for delta in client.generate([5] * 4, SamplingParams(max_tokens=100))]

        calls = [asyncio.create_task(call()) for _ in range(50)]
        done, running = await asyncio.wait(calls, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        while len(running) > 2:
            more, running = await asyncio.wait(running, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert all("tokens/s" in str(each.exception()) for each in done)
        daemon.engine.release()
        answers = await asyncio.gather(*running)
        assert [answer[-1].usage.output_tokens for answer in answers] == [100, 100]


@pytest.mark.asyncio
async def test_a_call_that_is_refused_for_others_reservations_is_told_to_come_again_soon(
    start_for_tenant, collect
):
    daemon = await start_for_tenant(tokens_per_second=0.01, burst_tokens=49.5)  # 50 are reserved
    daemon.engine.hold()
    async with Client(daemon.address, token="t") as client:
        running = asyncio.create_task(collect(client.generate([5], SamplingParams(max_tokens=100))))
        await daemon.engine.until(lambda: daemon.engine.live)
        with pytest.raises(ServiceError, match="may use all that is left") as refusal:
            await anext(client.generate([5], SHORT))
        assert refusal.value.retry_seconds == 1.0
        daemon.engine.release()
        await running
        with pytest.raises(ServiceError, match=r"used more than its 0\.01 tokens/s") as refusal:
            await anext(client.generate([5], SHORT))
        assert refusal.value.retry_seconds == 30.0  # days, if all of it were told


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["generate", "chat"])
async def test_what_was_encoded_and_then_refused_is_charged_up_to_the_context_cap(
    start_for_tenant, make_real_engine, description, collect, kind
):
    description = replace(description, max_model_len=64)
    engine = make_real_engine(max_model_len=64)
    daemon = await start_for_tenant(engine, description, tokens_per_second=1, burst_tokens=63)
    async with Client(daemon.address, token="t") as client:
        text = "a" * 500
        prompt = text if kind == "generate" else [{"role": "user", "content": text}]
        with pytest.raises(CapacityError, match=r"prompt has \d+ tokens"):
            await collect(getattr(client, kind)(prompt, SHORT))
        with pytest.raises(ServiceError, match="1 tokens/s") as refusal:
            await anext(client.generate([5], SHORT))
        assert refusal.value.retry_seconds < 3.0  # it owes 64 of 63


@pytest.mark.asyncio
async def test_a_text_that_is_refused_by_its_length_alone_costs_nothing(
    start_for_tenant, make_real_engine, collect
):
    daemon = await start_for_tenant(make_real_engine(max_model_len=64), tokens_per_second=1, burst_tokens=60)
    async with Client(daemon.address, token="t") as client:
        for _ in range(3):
            with pytest.raises(CapacityError, match="characters"):
                await collect(client.generate("a" * 10**6, SHORT))
        await collect(client.generate([5], SHORT))


def test_who_leaves_while_the_prompt_is_encoded_owes_no_more_than_the_context_cap(make_bucket):
    bucket = make_bucket(1.0, 10.0)
    caller, most = Caller(bucket.account, "x"), MostTokens.of(10**7, SHORT, 100)
    unread = DeltaStream(lambda: None, lambda channel: None)
    with pytest.raises(asyncio.CancelledError), caller.charged(most, unread):
        raise asyncio.CancelledError
    assert bucket.refusal() == pytest.approx(91)  # 100 of 10 were taken, and one must be there
