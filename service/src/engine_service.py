"""The methods of `pykv.v1.Engine`: they read a request, hand it to the engine, and pass on what comes."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import anyio
from google.protobuf.message import Message
from grpclib.server import Stream

from pykv.engine.delta_stream import DeltaStream
from pykv.engine.outputs import OutputDelta
from pykv.engine.stats import EngineStats
from pykv.errors import InvalidRequestError
from pykv.sampling import SamplingParams
from pykv.service.access import Account, Gate
from pykv.service.bill import MostTokens, estimated_tokens
from pykv.service.caller import Caller, log_end
from pykv.service.errors import EngineStalledError, FailedSequenceError, ModelLoadingError
from pykv.service.kv_events import EventFeed
from pykv.service.kv_events.messages import messages_of as messages_of_batch
from pykv.service.messages import params_of, responses_of, stats_message
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.requests import check_session_id, messages_of, prompt_of, receive
from pykv.service.served import ModelDescription, ServedModel, TokenEngine
from pykv.service.tracing import Tracing

__all__ = ["EngineService", "TakenRequest"]

STATS_SECONDS = 5.0
STATS_THREADS = 2

ResponseStream = Stream[Any, pb.GenerateResponse]
Deltas = AsyncGenerator[OutputDelta, None]
Request = TypeVar("Request", bound=Message)


@dataclass(frozen=True, slots=True)
class TakenRequest:
    """A request that the engine has.

    Attributes:
        operation: as traces name it.
        estimate: about how many tokens its prompt is.
        deltas: what the engine gives for it.
        pass_on: sends deltas to the client in its words, to the last.
    """

    operation: str
    params: SamplingParams
    estimate: int
    deltas: DeltaStream
    pass_on: Callable[[Deltas], Awaitable[None]]


class EngineService:
    """Serves one model, once it is loaded."""

    def __init__(self, gate: Gate, feed: EventFeed, tracing: Tracing) -> None:
        self._gate = gate
        self._feed = feed
        self._tracing = tracing
        self._served: ServedModel | None = None
        self._stats_threads = anyio.CapacityLimiter(STATS_THREADS)

    def serve(self, served: ServedModel) -> None:
        """Takes requests for this model from now on."""
        self._served = served

    async def Generate(self, stream: Stream[pb.GenerateRequest, pb.GenerateResponse]) -> None:  # noqa: N802
        """Continues a prompt."""

        def take(served: ServedModel, request: pb.GenerateRequest, caller: Caller) -> TakenRequest:
            prompt = prompt_of(request, served.description.max_model_len)
            params = params_of(request.sampling)
            deltas = served.engine.generate(prompt, params, **caller.names())
            pass_on = partial(_pass_on, caller, stream)
            return TakenRequest("text_completion", params, estimated_tokens(prompt), deltas, pass_on)

        await self.answer(stream, Caller.of, take)

    async def Chat(self, stream: Stream[pb.ChatRequest, pb.GenerateResponse]) -> None:  # noqa: N802
        """Answers a conversation."""

        def take(served: ServedModel, request: pb.ChatRequest, caller: Caller) -> TakenRequest:
            messages = messages_of(request)
            params = params_of(request.sampling)
            estimate = estimated_tokens(*(message["content"] for message in messages))
            deltas = served.engine.chat(messages, params, **caller.names())
            return TakenRequest("chat", params, estimate, deltas, partial(_pass_on, caller, stream))

        await self.answer(stream, Caller.of, take)

    async def answer(
        self,
        stream: Stream[Request, Any],
        caller_of: Callable[[Account, Request], Caller],
        take: Callable[[ServedModel, Request, Caller], TakenRequest],
    ) -> None:
        """Runs one request from its message to its last delta; whatever ends this, it ends in the engine too.

        Args:
            caller_of: says whose request a message is.
            take: reads the message and hands the request to the engine; what it returns holds nothing of the message.
        """
        account = self._gate.account_of(stream)
        with account.call(takes_tokens=True):
            served = self.model()
            request = await receive(stream)
            caller = caller_of(account, request)
            with caller.logged():
                taken = take(served, request, caller)
                del request  # a request that waits holds what the engine has of it, and no more
                traced = self._tracing.traced(
                    taken.deltas,
                    taken.operation,
                    model=served.description.name,
                    request_id=caller.request_id,
                    params=taken.params,
                    metadata=stream.metadata,
                )
                most = MostTokens.of(taken.estimate, taken.params, served.description.max_model_len)
                with caller.own_id_in_errors(), caller.charged(most, taken.deltas):
                    await taken.pass_on(traced)

    async def Abort(self, stream: Stream[pb.AbortRequest, pb.AbortResponse]) -> None:  # noqa: N802
        """Ends a request by its name."""
        account = self._gate.account_of(stream)
        request = await receive(stream)
        aborted = await self.model().engine.abort(account.tenant.own_id(request.request_id))
        await stream.send_message(pb.AbortResponse(aborted=aborted))

    async def EndSession(self, stream: Stream[pb.EndSessionRequest, pb.EndSessionResponse]) -> None:  # noqa: N802
        """Ends a session of the caller's tenant."""
        account = self._gate.account_of(stream)
        request = await receive(stream)
        if not request.session_id:
            raise InvalidRequestError("session_id is empty: allowed is the name of a session", "session_id")
        session_id = check_session_id(request.session_id)
        engine = self.model().engine
        ended = engine.end_session(session_id, tenant=account.tenant.cache_name)
        await stream.send_message(pb.EndSessionResponse(ended=ended))

    async def GetModel(self, stream: Stream[pb.GetModelRequest, pb.GetModelResponse]) -> None:  # noqa: N802
        """Says what is served."""
        self._gate.account_of(stream)
        await receive(stream)
        description = self.model().description
        told = pb.GetModelResponse.DESCRIPTOR.fields_by_name
        values = {
            entry.name: getattr(description, entry.name)
            for entry in fields(ModelDescription)
            if entry.name in told
        }
        await stream.send_message(pb.GetModelResponse(**values))

    async def SubscribeKvEvents(  # noqa: N802
        self, stream: Stream[pb.SubscribeKvEventsRequest, pb.KvEventBatch]
    ) -> None:
        """Tells operators which blocks can be found, until they leave."""
        account = self._gate.operator_of(stream)
        with account.call(needs_operator=True):
            request = await receive(stream)
            self.model()
            with self._feed.subscribe(request.next_sequence_number) as subscription:
                async for batch in subscription.batches():
                    for message in messages_of_batch(batch):
                        await stream.send_message(message)

    async def GetStats(self, stream: Stream[pb.GetStatsRequest, pb.GetStatsResponse]) -> None:  # noqa: N802
        """Counts, taken in a thread: the engine's lock may be held by a step that hangs."""
        self._gate.operator_of(stream)
        await receive(stream)
        engine = self.model().engine
        stats = await self.stats(engine)
        await stream.send_message(stats_message(stats, engine.timing()))

    async def stats(self, engine: TokenEngine) -> EngineStats:
        """The engine's counts.

        Raises:
            EngineStalledError: it did not give them in time.
        """
        with anyio.move_on_after(STATS_SECONDS):
            return await anyio.to_thread.run_sync(
                engine.stats, abandon_on_cancel=True, limiter=self._stats_threads
            )
        raise EngineStalledError(f"the engine did not give its counts within {STATS_SECONDS:g} s")

    def model(self) -> ServedModel:
        """What is served.

        Raises:
            ModelLoadingError: nothing yet.
        """
        if self._served is None:
            raise ModelLoadingError("the model is not loaded yet; try again later")
        return self._served


async def _pass_on(caller: Caller, stream: ResponseStream, deltas: Deltas) -> None:
    """Sends deltas as they come. Whatever ends this, the request in the engine ends with it.

    While a send waits for the client, the engine merges the deltas that follow and bounds how many wait.

    Raises:
        FailedSequenceError: at the end, where a sequence failed.
    """
    failed: FailedSequenceError | None = None
    request_id = caller.request_id
    async with aclosing(deltas):
        async for delta in deltas:
            for response in responses_of(delta, request_id):
                await stream.send_message(response)
            request_id = ""  # said once
            if delta.finish_reason == "error":
                failed = FailedSequenceError(delta.error or "the sequence failed")
            if delta.usage is not None:
                log_end(delta.finish_reason, delta.usage)
    if failed is not None:
        raise failed
