"""What the engine makes is charged once, token by token, whoever reads it and however the call ends."""

import hashlib

import pytest
from smg_grpc_proto import vllm_engine_pb2 as gateway_pb

from pykv.service.protocol import engine_pb2 as pb

pytestmark = pytest.mark.asyncio

GENERATE, CHAT, ABORT = (f"/pykv.v1.Engine/{name}" for name in ("Generate", "Chat", "Abort"))
GATEWAY = "/vllm.grpc.engine.VllmEngine/Generate"
AUTHORIZATION = ("authorization", "Bearer t")
BURST = 10**7
MADE = 20


def generate(n):
    sampling = pb.SamplingParams(max_tokens=3000, ignore_eos=True, n=n)
    return GENERATE, pb.GenerateRequest(
        request_id="r", token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=sampling
    )


def chat(n):
    sampling = pb.SamplingParams(max_tokens=3000, ignore_eos=True, n=n)
    messages = [pb.ChatMessage(role="user", content="hello")]
    return CHAT, pb.ChatRequest(request_id="r", messages=messages, sampling=sampling)


def gateway(n, *, stream):
    request = gateway_pb.GenerateRequest(request_id="r", stream=stream)
    request.tokenized.input_ids.extend([5, 6, 7])
    sampling = gateway_pb.SamplingParams(max_tokens=3000, ignore_eos=True, n=n, temperature=1.0)
    request.sampling_params.CopyFrom(sampling)
    return GATEWAY, request


REQUESTS = {
    "generate": generate(1),
    "generate n=3": generate(3),
    "chat": chat(3),
    "gateway": gateway(3, stream=True),
    "gateway whole": gateway(3, stream=False),
}


class Unread:
    """A daemon for one tenant, and a call of it of which the client reads nothing."""

    def __init__(self, daemon, connection):
        self.daemon, self.connection = daemon, connection
        (self.account,) = daemon.daemon._gate.accounts()
        self.engine = daemon.engine
        self.stream_id = None

    async def begin(self, path, request, framed, **options):
        self.stream_id = self.connection.request(
            path, framed(request), more_headers=[AUTHORIZATION], **options
        )
        await self.connection.flush()

    async def reset(self):
        self.connection.h2.reset_stream(self.stream_id)
        await self.connection.flush()

    async def abort(self, framed):
        request = framed(pb.AbortRequest(request_id="r"))
        self.connection.request(ABORT, request, more_headers=[AUTHORIZATION])
        await self.connection.flush()

    def fail(self, monkeypatch):
        def step():
            raise ZeroDivisionError

        monkeypatch.setattr(self.engine.engine.steps, "step", step)

    @property
    def num_charged(self):
        return round(BURST - self.account._level)

    @property
    def num_made(self):
        return self.engine.timing().num_new_tokens


@pytest.fixture
def start_unread(start_daemon, make_real_engine, in_step, open_raw, tmp_path):
    """`await start_unread(**options)`; the engine has no more than one step to go before the loop has seen the last."""

    async def start(**options):
        path = tmp_path / "tenants.toml"
        digest = hashlib.sha256(b"t").hexdigest()
        path.write_text(
            f'[tenants.t]\ntoken_sha256 = ["{digest}"]\ntokens_per_second = 0.001\nburst_tokens = {BURST}'
        )
        engine = in_step(make_real_engine(max_pending_tokens=2**10), seconds=5)
        daemon = await start_daemon(engine, tenants=str(path), **options)
        return Unread(daemon, await open_raw(initial_window=0, address=daemon.address))

    return start


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("end", ["reset", "connection lost", "deadline", "stall", "abort", "drain", "death"])
async def test_what_nobody_read_is_charged_however_the_call_ends(
    start_unread, framed, eventually, monkeypatch, request_name, end
):
    unread = await start_unread(stall_timeout=0.5 if end == "stall" else 20.0)
    path, request = REQUESTS[request_name]
    await unread.begin(path, request, framed, timeout="400m" if end == "deadline" else None)

    async def has_made_some():
        return unread.num_made >= MADE

    await eventually(has_made_some)
    if end == "reset":
        await unread.reset()
    elif end == "connection lost":
        await unread.connection.close()
    elif end == "abort":
        await unread.abort(framed)
    elif end == "drain":
        await unread.daemon.stop()
    elif end == "death":
        unread.fail(monkeypatch)
    if end == "stall" and request_name == "gateway whole":
        await unread.reset()  # there is nothing to be read, so nothing stalls

    async def has_ended():
        return unread.account.num_in_flight == 0 and unread.account._num_reserved == 0

    if end == "abort":  # what ended well waits to be read
        unread.connection.h2.increment_flow_control_window(2**20, unread.stream_id)
        await unread.connection.flush()
    await eventually(has_ended)
    num_prompt_tokens = len(request.token_ids.ids) if path == GENERATE else 3
    if path == CHAT:
        tokenizer = unread.engine.engine
        num_prompt_tokens = len(tokenizer.encode_chat([{"role": "user", "content": "hello"}]))
    assert unread.num_charged == num_prompt_tokens + unread.num_made
    await unread.connection.close()


async def test_a_bucket_binds_a_client_that_reads_nothing(start_unread, framed, eventually):
    unread = await start_unread()
    path, request = REQUESTS["generate n=3"]
    for _ in range(3):
        num_before = unread.num_made
        await unread.begin(path, request, framed)

        async def has_made_some(num_before=num_before):
            return unread.num_made >= num_before + MADE

        await eventually(has_made_some)
        assert unread.num_charged >= num_before + MADE - 3  # while it runs: the last step may be on its way
        await unread.reset()

    async def has_ended():
        return unread.account._num_reserved == 0

    await eventually(has_ended)
    assert unread.num_charged == 3 * 3 + unread.num_made
    await unread.connection.close()
