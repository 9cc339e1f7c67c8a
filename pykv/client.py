"""An asynchronous client of `pykv-serve`."""

import math
import os
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpclib.client import Stream
from grpclib.const import Cardinality
from grpclib.health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from pykv.engine.histogram import HistogramCounts
from pykv.engine.outputs import OutputDelta
from pykv.errors import ConfigError, InvalidRequestError
from pykv.field_checks import (
    as_bytes,
    as_integer,
    as_number_in,
    as_text,
    instance_of,
    optional,
    refusal,
    refuse,
)
from pykv.retention import Retention
from pykv.sampling import SamplingParams
from pykv.service.certificate import check_labels
from pykv.service.client.channel import DEFAULT_MAX_MESSAGE_BYTES, PatientChannel
from pykv.service.client.failures import ServiceError, raising_typed
from pykv.service.client.messages import deltas_of, histogram_of, retention_message, sampling_message
from pykv.service.client.samples import OpenSamples
from pykv.service.files import read_bytes
from pykv.service.messages import HISTOGRAMS
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.servable import cardinality_of, path_of
from pykv.service.served import ModelDescription
from pykv.token_array import as_token_array

__all__ = ["Client", "ServiceError", "tls_context"]

DEFAULT_ADDRESS = "127.0.0.1:50051"
LARGEST_MESSAGE_BYTES = 2**32 - 1  # gRPC says a message's length in four bytes
LEAST_KEEPALIVE_SECONDS = 5.0  # between two PINGs; a server takes more frequent ones for abuse
ENGINE = pb.DESCRIPTOR.services_by_name["Engine"]
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

Reply = TypeVar("Reply", bound=Message)


class Client:
    """A connection to one server, for one event loop; it is made at the first call.

    ```
    async with Client("127.0.0.1:50051") as client:
        async for delta in client.generate("The capital of France is", SamplingParams(max_tokens=8)):
            print(delta.text, end="")
    ```

    A call that fails raises what the server raised where `pykv.errors` has it (such as InvalidRequestError),
    TimeoutError where its deadline passed, and ServiceError, with the status, otherwise. So does an answer that is not
    whole: without a status at its end, or with a sample that has no finish reason.

    Args:
        address: HOST:PORT of the server; [HOST]:PORT for IPv6.
        token: the bearer token that stands for a tenant.
        tls: for a server with a certificate, see `tls_context`; None = plain text.
        max_message_bytes: size of a message from the server; a larger one is refused by the length that it announces,
            before it is buffered, and ends its call alone, with ServiceError, status RESOURCE_EXHAUSTED. With the
            options that `pykv-serve` has by default none is a hundredth of the default, 64 MiB, but for batches of
            `kv_events`: the longest, of 65,536 blocks of 256 tokens, still fits. A call buffers a message and 256 KiB.
        keepalive_seconds: after so long without a byte from the server, while there are calls, it is asked by a PING
            whether it is still there; at least 5, since servers close connections that ask more often; None = never,
            and a server that vanishes without a word is waited for.
        keepalive_timeout_seconds: how long it may take to answer. Then all calls of the connection end with
            ServiceError, status UNAVAILABLE, and the next call makes a new connection.

    Raises:
        ConfigError: the address is none, the token is no printable ASCII, `tls` is no context, `max_message_bytes` is
            no integer from 1 to 2^32 - 1, `keepalive_seconds` is no number of at least 5, or
            `keepalive_timeout_seconds` none above 0.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        keepalive_seconds: float | None = 30.0,
        keepalive_timeout_seconds: float = 20.0,
    ) -> None:
        self._host, self._port = _split(address)
        self._address = address
        self._metadata = {} if token is None else {"authorization": f"Bearer {_checked(token)}"}
        self._tls = optional(instance_of, "tls", tls, ssl.SSLContext, ConfigError)
        self._max_message_bytes = as_integer(
            "max_message_bytes", max_message_bytes, 1, LARGEST_MESSAGE_BYTES, ConfigError
        )
        self._keepalive_seconds = optional(_as_interval, "keepalive_seconds", keepalive_seconds)
        self._keepalive_timeout_seconds = _as_seconds("keepalive_timeout_seconds", keepalive_timeout_seconds)
        self._channel: PatientChannel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends every call of this client and closes the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        cache_salt: bytes = b"",
        retention: Retention | None = None,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Streams the continuation of a prompt, a text or token ids.

        Leaving the iterator, for any reason, ends the request on the server. What the server refuses is
        raised by the first step.

        Args:
            request_id: for `abort`; empty = the server draws one.
            cache_salt: requests of different salts share no cached blocks.
            retention: how long the request's blocks matter, such as `Retention(session_id="chat 7")`.
            timeout_seconds: after which the call fails with TimeoutError; None = never.

        Raises:
            InvalidRequestError: an argument is not of its type; nothing was sent.
        """
        request = pb.GenerateRequest(**_asked(params, request_id, cache_salt, retention))
        _set_prompt(request, prompt)
        return self._stream("Generate", request, _checked_timeout(timeout_seconds))

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        cache_salt: bytes = b"",
        retention: Retention | None = None,
        timeout_seconds: float | None = None,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Streams the answer to a conversation, mappings with `role` and `content`; else as `generate`."""
        request = pb.ChatRequest(**_asked(params, request_id, cache_salt, retention))
        request.messages.extend(_messages(messages))
        return self._stream("Chat", request, _checked_timeout(timeout_seconds))

    async def abort(self, request_id: str) -> bool:
        """Ends a running request by its name; False where no live request bears it."""
        reply = await self._ask(
            "Abort", pb.AbortRequest(request_id=_as_wire_text("request_id", request_id)), pb.AbortResponse
        )
        return reply.aborted

    async def end_session(self, session_id: str) -> bool:
        """Says that a session has no further turn; False where none of this name is live."""
        request = pb.EndSessionRequest(session_id=_as_wire_text("session_id", session_id))
        return (await self._ask("EndSession", request, pb.EndSessionResponse)).ended

    async def kv_events(self, next_sequence_number: int = 0) -> AsyncGenerator[pb.KvEventBatch, None]:
        """Streams which blocks can be found in the server's cache: a snapshot, then what changes.

        Args:
            next_sequence_number: of the batch that is expected; where that comes next there is no snapshot.
        """
        number = as_integer("next_sequence_number", next_sequence_number, 0, 2**63 - 1)
        request = pb.SubscribeKvEventsRequest(next_sequence_number=number)
        stream: Stream[Any, pb.KvEventBatch] = self._open("SubscribeKvEvents", None)
        with self._failures(stream):
            async with stream:
                await stream.send_message(request, end=True)
                async for batch in stream:
                    yield batch
                await stream.recv_trailing_metadata()  # else grpclib takes the end of a connection for it

    async def get_model(self) -> ModelDescription:
        """What the server serves."""
        reply = await self._ask("GetModel", pb.GetModelRequest(), pb.GetModelResponse)
        told = pb.GetModelResponse.DESCRIPTOR.fields_by_name
        values = {
            entry.name: getattr(reply, entry.name) for entry in fields(ModelDescription) if entry.name in told
        }
        values |= {"eos_token_ids": tuple(reply.eos_token_ids), "architectures": tuple(reply.architectures)}
        return ModelDescription(**values)

    async def get_stats(self) -> dict[str, int]:
        """Counts of the cache and the scheduler, by the names of `pykv.v1.GetStatsResponse`."""
        return (await self.get_counts_and_times())[0]

    async def get_counts_and_times(self) -> tuple[dict[str, int], dict[str, HistogramCounts]]:
        """The same counts, and what was measured of waits and stalls, in seconds, by the same names."""
        reply = await self._ask("GetStats", pb.GetStatsRequest(), pb.GetStatsResponse)
        counts = {
            name: getattr(reply, name) for name in reply.DESCRIPTOR.fields_by_name if name not in HISTOGRAMS
        }
        return counts, {name: histogram_of(getattr(reply, name)) for name in HISTOGRAMS}

    async def health(self, service: str = ENGINE.full_name) -> str:
        """SERVING or NOT_SERVING: of the model's service, or, where `service` is empty, of the process."""
        request = HealthCheckRequest(service=_as_wire_text("service", service))
        stream: Stream[Any, HealthCheckResponse] = self._connect().request(
            HEALTH_CHECK,
            Cardinality.UNARY_UNARY,
            HealthCheckRequest,
            HealthCheckResponse,
            metadata=self._metadata,
        )
        reply = await self._exchange(stream, request)
        if reply.status not in HealthCheckResponse.ServingStatus.values():
            allowed = f"this client knows {', '.join(HealthCheckResponse.ServingStatus.keys())}"
            raise ServiceError(f"the server sent the health {reply.status}: {allowed}", "INTERNAL")
        return HealthCheckResponse.ServingStatus.Name(reply.status)

    async def _ask(self, method: str, request: Message, reply_type: type[Reply]) -> Reply:
        stream: Stream[Any, Reply] = self._open(method, None)
        return await self._exchange(stream, request)

    async def _exchange(self, stream: Stream[Any, Reply], request: Message) -> Reply:
        with self._failures(stream):
            async with stream:
                await stream.send_message(request, end=True)
                reply = await stream.recv_message()
                more = None if reply is None else await stream.recv_message()
                if more is None:
                    await stream.recv_trailing_metadata()
        if reply is None or more is not None:
            number = "no reply" if reply is None else "more than one reply"
            raise ServiceError(f"the server sent {number}: allowed is one", "INTERNAL")
        return reply

    async def _stream(
        self, method: str, request: pb.GenerateRequest | pb.ChatRequest, timeout_seconds: float | None
    ) -> AsyncGenerator[OutputDelta, None]:
        stream: Stream[Any, pb.GenerateResponse] = self._open(method, timeout_seconds)
        request_id = ""
        prompt_logprobs: list[pb.TokenLogprobs] = []
        samples = OpenSamples(request.sampling.n)
        with self._failures(stream):
            async with stream:
                await stream.send_message(request, end=True)
                async for response in stream:
                    request_id = response.request_id or request_id
                    prompt_logprobs.extend(response.prompt_logprobs)
                    samples.take(response.deltas)
                    for delta in deltas_of(response, request_id, prompt_logprobs):
                        yield delta
                    if response.deltas:
                        prompt_logprobs.clear()
                await stream.recv_trailing_metadata()
        samples.check_ended()

    def _open(self, name: str, timeout_seconds: float | None) -> Stream[Any, Any]:
        method = ENGINE.methods_by_name[name]
        return self._connect().request(
            path_of(method),
            cardinality_of(method),
            GetMessageClass(method.input_type),
            GetMessageClass(method.output_type),
            timeout=timeout_seconds,
            metadata=self._metadata,
        )

    def _failures(self, stream: Stream[Any, Any]) -> AbstractContextManager[None]:
        """Raises those of a call as the exceptions of pykv."""
        return raising_typed(stream, self._address, is_tls=self._tls is not None)

    def _connect(self) -> PatientChannel:
        if self._channel is None:
            self._channel = PatientChannel(
                self._host,
                self._port,
                self._tls,
                self._max_message_bytes,
                self._keepalive_seconds,
                self._keepalive_timeout_seconds,
            )
        return self._channel


def _asked(
    params: SamplingParams | None, request_id: str, cache_salt: bytes, retention: Retention | None
) -> dict[str, Any]:
    """The fields that all requests for tokens have."""
    sampling = SamplingParams() if params is None else params
    optional(instance_of, "retention", retention, Retention, InvalidRequestError)
    return {
        "request_id": _as_wire_text("request_id", request_id),
        "sampling": sampling_message(instance_of("params", sampling, SamplingParams, InvalidRequestError)),
        "cache_salt": as_bytes("cache_salt", cache_salt),
        "retention": retention_message(retention),
    }


def _checked_timeout(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    return as_number_in("timeout_seconds", seconds, 0.0, math.inf, below_high=True)


def _as_wire_text(field: str, value: object) -> str:
    """Returns a text that UTF-8 has bytes for."""
    text = as_text(field, value)
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse(field, value, "Unicode text")
    return text


def _messages(messages: object) -> list[pb.ChatMessage]:
    """The messages of a conversation; which roles there are the server knows."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        refuse("messages", messages, "a sequence of messages, each with role and content")
    return [_message(message) for message in messages]


def _message(message: object) -> pb.ChatMessage:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        refuse("messages", message, "messages that are mappings with role and content alone")
    return pb.ChatMessage(**{name: _as_wire_text("messages", text) for name, text in message.items()})


def _set_prompt(request: pb.GenerateRequest, prompt: str | Sequence[int]) -> None:
    if isinstance(prompt, str):
        request.text = _as_wire_text("prompt", prompt)
        return
    request.token_ids.SetInParent()
    request.token_ids.ids.extend(as_token_array(prompt, "prompt").tolist())


def tls_context(
    authorities: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> ssl.SSLContext:
    """What a client needs to speak with a server that has a certificate, for `tls` of `Client`.

    ```
    Client("localhost:50051", tls=tls_context("ca.pem", "client.pem", "client.key"))
    ```

    Args:
        authorities: PEM file of those who may have signed the server's certificate, and nobody else is trusted; None =
            those of the system.
        certificate: PEM file of what the client shows where the server asks for it; None = nothing.
        key: PEM file of its private key; None = that is in `certificate` too.

    Raises:
        ConfigError: a file cannot be read, is none, holds what only OpenSSL takes for a certificate, or does not fit
            the others; or a key comes without a certificate.
    """
    if key is not None and certificate is None:
        raise ConfigError(
            "key is given without certificate: allowed are both, or a certificate that holds its key"
        )
    with _usable(f"authorities {authorities}", "a PEM file of certificates"):
        context = ssl.create_default_context(cafile=authorities)
    if authorities is not None:
        _check_labels("authorities", authorities)
    if certificate is not None:
        files = f"certificate {certificate}" + ("" if key is None else f" and key {key}")
        with _usable(
            files, "PEM files, the private key in its own or in the certificate's, and the one fits the other"
        ):
            context.load_cert_chain(certificate, key)
        _check_labels("certificate", certificate)
    context.set_alpn_protocols(["h2"])
    return context


def _check_labels(name: str, path: str | os.PathLike[str]) -> None:
    check_labels(read_bytes(Path(path), name), f"{name} {path}")


@contextmanager
def _usable(files: str, allowed: str) -> Iterator[None]:
    try:
        yield
    except (OSError, TypeError, ValueError) as error:  # TypeError, ValueError: it can be no path
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"{files} cannot be used: {reason}: allowed is {allowed}") from error


def _checked(token: str) -> str:
    as_text("token", token, ConfigError)
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError("token is empty or holds what no token may hold: allowed is printable ASCII")
    return token


def _as_interval(field: str, value: object) -> float:
    try:
        return as_number_in(field, value, LEAST_KEEPALIVE_SECONDS, math.inf, ConfigError, below_high=True)
    except ConfigError:
        number = f"a finite number of at least {LEAST_KEEPALIVE_SECONDS:g}"
        allowed = f"{number}, since the server closes a connection that asks more often"
        raise refusal(field, value, allowed, ConfigError) from None


def _as_seconds(field: str, value: object) -> float:
    return as_number_in(field, value, 0.0, math.inf, ConfigError, above_low=True, below_high=True)


def _split(address: str) -> tuple[str, int]:
    as_text("address", address, ConfigError)
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) < 2**16):
        refuse("address", address, f"HOST:PORT, such as {DEFAULT_ADDRESS}", ConfigError)
    return host.removeprefix("[").removesuffix("]"), int(port)
