"""Clients that behave badly, at random, for as long as wanted: `python soak.py ADDRESS SEED SECONDS`.

They have a process of their own, so that what they take is not taken for the daemon's. At the end it prints, as JSON,
how often each kind of thing was done.
"""

import asyncio
import json
import random
import sys
from contextlib import asynccontextmanager, suppress

from h2.exceptions import ProtocolError
from raw_connection import RawConnection, framed

from pykv.client import Client
from pykv.errors import PykvError
from pykv.sampling import SamplingParams
from pykv.service.protocol import engine_pb2 as pb

GENERATE = "/pykv.v1.Engine/Generate"
NUM_CLIENTS = 12
LONG = 3000
KINDS = (
    *("whole", "stop", "leave", "cancel", "reset", "abort", "expire", "flood", "garbage", "cut off"),
    *("half a message", "no message", "slow", "bad request", "chat"),
    *("pause", "stay away", "trickle", "half a frame"),
)


class Soak:
    """Some clients at once, each of which does one thing after the other until the time is up.

    They begin with floods, all at once: the most that the daemon will have to hold comes first.

    Attributes:
        done: how often each kind of thing was done.
    """

    def __init__(self, address, seed):
        self._address = address
        self._random = random.Random(seed)
        self.done = dict.fromkeys(KINDS, 0)

    async def run(self, seconds):
        """Runs until the time is up and each kind was done once at least."""
        end = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(self._client(end))

    async def _client(self, end):
        loop = asyncio.get_running_loop()
        async with Client(self._address) as client:
            await self._flood(client)
            while loop.time() < end or 0 in self.done.values():
                missing = [kind for kind in KINDS if not self.done[kind]]
                kind = self._random.choice(missing or KINDS)
                self.done[kind] += 1
                # What the server has sent away, h2 says, may not send any more.
                with suppress(PykvError, TimeoutError, ConnectionError, ProtocolError):
                    await getattr(self, "_" + kind.replace(" ", "_"))(client)

    def _prompt(self):
        return self._random.choice("abcdef") * self._random.randrange(1, 300)

    def _params(self, most=40, **options):
        return SamplingParams(max_tokens=self._random.randrange(1, most), ignore_eos=True, **options)

    async def _whole(self, client):
        params = self._params(n=self._random.choice([1, 1, 3]), seed=7)
        deltas = [delta async for delta in client.generate(self._prompt(), params)]
        assert deltas[-1].usage is not None

    async def _stop(self, client):
        async for _ in client.generate(self._prompt(), self._params(most=200, stop=("e", "a"))):
            pass

    async def _chat(self, client):
        messages = [{"role": "user", "content": self._prompt()}]
        async for _ in client.chat(messages, self._params()):
            pass

    async def _leave(self, client):
        stream = client.generate(self._prompt(), self._params(most=LONG))
        for _ in range(self._random.randrange(4)):
            with suppress(StopAsyncIteration):
                await anext(stream)
        await stream.aclose()

    async def _cancel(self, client):
        async def read():
            async for _ in client.generate(self._prompt(), self._params(most=LONG)):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(self._random.random() * 0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _abort(self, client):
        name = f"n{self._random.randrange(10**9)}"
        stream = client.generate(self._prompt(), self._params(most=LONG), request_id=name)
        await anext(stream)
        await client.abort(name)
        async for _ in stream:
            pass

    async def _expire(self, client):
        timeout = self._random.random() * 0.05
        async for _ in client.generate(self._prompt(), self._params(most=LONG), timeout_seconds=timeout):
            pass

    async def _flood(self, client):
        async def ask():
            with suppress(PykvError):
                async for _ in client.generate(self._prompt(), self._params(most=8)):
                    pass

        await asyncio.gather(*(ask() for _ in range(60)))

    async def _bad_request(self, client):
        with suppress(PykvError):
            async for _ in client.generate([-1, 2**40], self._params()):
                pass

    @asynccontextmanager
    async def _raw(self, **options):
        """A connection by hand, which is closed however it is left."""
        connection = await RawConnection.open(self._address, **options)
        try:
            yield connection
        finally:
            await connection.close()

    async def _reset(self, client):
        async with self._raw() as connection:
            for _ in range(5):
                stream_id = connection.request(GENERATE, self._request())
                if self._random.random() < 0.5:
                    await connection.flush()
                connection.h2.reset_stream(stream_id)
            await connection.flush()

    async def _cut_off(self, client):
        async with self._raw() as connection:
            for _ in range(5):
                connection.request(GENERATE, self._request())
            await connection.flush()
            connection.abort()

    async def _half_a_message(self, client):
        async with self._raw() as connection:
            stream_id = connection.request(GENERATE, framed(b"x" * 10, length=20))
            await connection.flush()
            await connection.status(stream_id)

    async def _no_message(self, client):
        async with self._raw() as connection:
            connection.request(GENERATE, end_stream=False)
            await connection.flush()
            connection.abort()

    async def _garbage(self, client):
        reader, writer = await asyncio.open_connection(*self._address.rsplit(":", 1))
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" * self._random.randrange(2)
        writer.write(preface + self._random.randbytes(2000))
        try:
            await asyncio.wait_for(reader.read(), 1.0)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _slow(self, client):
        async with self._raw(initial_window=200) as connection:
            connection.request(GENERATE, self._request())
            await connection.flush()
            await asyncio.sleep(self._random.random() * 0.2)

    async def _pause(self, client):
        """Reads nothing for a while, then everything."""
        async with self._raw(initial_window=0) as connection:
            stream_id = connection.request(GENERATE, self._request(most=400))
            await connection.flush()
            await asyncio.sleep(self._random.random() * 0.3)
            connection.h2.increment_flow_control_window(2**24, stream_id)
            await connection.flush()
            await connection.status(stream_id)

    async def _stay_away(self, client):
        async with self._raw(initial_window=50) as connection:
            stream_id = connection.request(GENERATE, self._request(least=LONG // 2))
            await connection.flush()
            await connection.status(stream_id)

    async def _trickle(self, client):
        """A request in single bytes, which does not come in time."""
        async with self._raw() as connection:
            stream_id = connection.request(GENERATE, end_stream=False)
            for byte in framed(b"x" * 40)[: self._random.randrange(45)]:
                connection.h2.send_data(stream_id, bytes([byte]))
                await connection.flush()
            await connection.status(stream_id)

    async def _half_a_frame(self, client):
        async with self._raw() as connection:
            connection.request(GENERATE, self._request())
            connection.writer.write(connection.h2.data_to_send()[: self._random.randrange(1, 60)])
            await asyncio.wait_for(connection.reader.read(2**20), 20.0)
            await asyncio.wait_for(connection.reader.read(2**20), 20.0)

    def _request(self, most=LONG, least=1):
        sampling = pb.SamplingParams(max_tokens=self._random.randrange(least, most), ignore_eos=True)
        return framed(pb.GenerateRequest(text=self._prompt(), sampling=sampling))


def main():
    address, seed, seconds = sys.argv[1:]
    soak = Soak(address, int(seed))
    asyncio.run(soak.run(float(seconds)))
    print(json.dumps(soak.done))


if __name__ == "__main__":
    main()
