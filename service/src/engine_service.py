"""The methods of `pykv.v1.Engine`: they read a request, hand it to the engine, and pass on what comes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields
from typing import Any

import anyio
import structlog
from grpclib.server import Stream

from pykv.engine.outputs import OutputDelta, Usage
from pykv.engine.stats import EngineStats
from pykv.errors import PykvError
from pykv.service.errors import EngineStalledError, ModelLoadingError
from pykv.service.messages import params_of, responses_of, stats_message
from pykv.service.protocol import engine_pb2 as pb
from pykv.service.requests import check_salt, messages_of, prompt_of, receive, request_id_of
from pykv.service.served import ModelDescription, ServedModel, TokenEngine

__all__ = ["EngineService"]

STATS_SECONDS = 5.0
STATS_THREADS = 2

ResponseStream = Stream[Any, pb.GenerateResponse]
Deltas = AsyncGenerator[OutputDelta, None]

log = structlog.get_logger("pykv.service")


class FailedSequenceError(PykvError):
    """A sequence ended because something went wrong in the engine."""


class EngineService:
    """Serves one model, once it is loaded."""

    def __init__(self) -> None:
        self._served: ServedModel | None = None
        self._stats_threads = anyio.CapacityLimiter(STATS_THREADS)

    def serve(self, served: ServedModel) -> None:
        """Takes requests for this model from now on."""
        self._served = served

    async def Generate(self, stream: Stream[pb.GenerateRequest, pb.GenerateResponse]) -> None:  # noqa: N802
        """Continues a prompt."""
        request = await receive(stream)
        served, request_id = self._model(), request_id_of(request.request_id)
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            prompt = prompt_of(request, served.description.max_model_len)
            params, scope = params_of(request.sampling), check_salt(request.cache_salt)
            deltas = served.engine.generate(prompt, params, request_id=request_id, scope=scope)
            await _pass_on(deltas, request_id, stream)

    async def Chat(self, stream: Stream[pb.ChatRequest, pb.GenerateResponse]) -> None:  # noqa: N802
        """Answers a conversation."""
        request = await receive(stream)
        served, request_id = self._model(), request_id_of(request.request_id)
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            messages = messages_of(request)
            params, scope = params_of(request.sampling), check_salt(request.cache_salt)
            deltas = served.engine.chat(messages, params, request_id=request_id, scope=scope)
            await _pass_on(deltas, request_id, stream)

    async def Abort(self, stream: Stream[pb.AbortRequest, pb.AbortResponse]) -> None:  # noqa: N802
        """Ends a request by its name."""
        request = await receive(stream)
        aborted = await self._model().engine.abort(request.request_id)
        await stream.send_message(pb.AbortResponse(aborted=aborted))

    async def GetModel(self, stream: Stream[pb.GetModelRequest, pb.GetModelResponse]) -> None:  # noqa: N802
        """Says what is served."""
        await receive(stream)
        description = self._model().description
        values = {entry.name: getattr(description, entry.name) for entry in fields(ModelDescription)}
        await stream.send_message(pb.GetModelResponse(**values))

    async def GetStats(self, stream: Stream[pb.GetStatsRequest, pb.GetStatsResponse]) -> None:  # noqa: N802
        """Counts, taken in a thread: the engine's lock may be held by a step that hangs."""
        await receive(stream)
        stats = await self._stats(self._model().engine)
        await stream.send_message(stats_message(stats))

    async def _stats(self, engine: TokenEngine) -> EngineStats:
        with anyio.move_on_after(STATS_SECONDS):
            return await anyio.to_thread.run_sync(
                engine.stats, abandon_on_cancel=True, limiter=self._stats_threads
            )
        raise EngineStalledError(f"the engine did not give its counts within {STATS_SECONDS:g} s")

    def _model(self) -> ServedModel:
        if self._served is None:
            raise ModelLoadingError("the model is not loaded yet; try again later")
        return self._served


async def _pass_on(deltas: Deltas, request_id: str, stream: ResponseStream) -> None:
    """Sends deltas as they come. Whatever ends this, the request in the engine ends with it.

    While a send waits for the client, the engine merges the deltas that follow and bounds how many wait.

    Raises:
        FailedSequenceError: at the end, where a sequence failed.
    """
    failed: FailedSequenceError | None = None
    async with aclosing(deltas):
        async for delta in deltas:
            for response in responses_of(delta, request_id):
                await stream.send_message(response)
            request_id = ""  # said once
            if delta.finish_reason == "error":
                failed = FailedSequenceError(delta.error or "the sequence failed")
            if delta.usage is not None:
                _log_end(delta.finish_reason, delta.usage)
    if failed is not None:
        raise failed


def _log_end(finish_reason: str | None, usage: Usage) -> None:
    values = {entry.name: getattr(usage, entry.name) for entry in fields(Usage)}
    log.info("request ended", finish_reason=finish_reason, **values)
