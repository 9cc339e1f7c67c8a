"""The methods of `vllm.grpc.engine.VllmEngine`, served by the same engine as `pykv.v1.Engine`."""

import hashlib
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from typing import Any

import anyio
import anyio.to_thread
from google.protobuf.descriptor import ServiceDescriptor
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from pykv.engine.delta_stream import DeltaStream
from pykv.engine.merging import merged
from pykv.engine.outputs import OutputDelta
from pykv.errors import InvalidRequestError
from pykv.service.access import Account, Gate
from pykv.service.bill import estimated_tokens
from pykv.service.caller import Caller, log_end
from pykv.service.engine_service import EngineService, TakenRequest
from pykv.service.errors import FailedSequenceError
from pykv.service.gateway.kv_events import batches_of
from pykv.service.gateway.messages import chunk_of, complete_of, params_of, prompt_of
from pykv.service.health import HealthState
from pykv.service.kv_events import EventFeed
from pykv.service.request_limits import ABORTED_IDS_LIMIT
from pykv.service.requests import receive, request_id_of
from pykv.service.served import ServedModel
from pykv.service.tokenizer_archive import tokenizer_chunks
from pykv.service.transport.shared_budget import SharedBudget
from pykv.service.transport.sharing import group_of, sharer_of

__all__ = ["GatewayService", "gateway_descriptor"]

MAX_TOKENIZER_READERS = 64

AnyStream = Stream[Any, Any]
Deltas = AsyncGenerator[OutputDelta, None]


def gateway_descriptor() -> ServiceDescriptor:
    """What the service looks like."""
    descriptor: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["VllmEngine"]
    return descriptor


class GatewayService:
    """Serves what the other service serves, in the gateway's words.

    Args:
        engine_service: knows the model, once it is loaded.
    """

    def __init__(
        self, gate: Gate, engine_service: EngineService, health: HealthState, feed: EventFeed
    ) -> None:
        self._gate = gate
        self._feed = feed
        self._engine_service = engine_service
        self._health = health
        self._start = time.monotonic()
        self._archive: bytes | None = None
        self._archive_digest = ""
        self._making_archive = anyio.Lock()
        self._readers = SharedBudget(MAX_TOKENIZER_READERS)

    async def Generate(self, stream: AnyStream) -> None:  # noqa: N802
        """Continues a prompt; a request that is not to be streamed gets each sample whole."""

        def caller_of(account: Account, request: pb.GenerateRequest) -> Caller:
            return Caller(account, request_id_of(request.request_id))

        def take(served: ServedModel, request: pb.GenerateRequest, caller: Caller) -> TakenRequest:
            prompt, params = prompt_of(request), params_of(request.sampling_params)
            deltas = served.engine.generate(prompt, params, **caller.names())
            answer = _Answer(stream, deltas)
            pass_on = answer.stream if request.stream else answer.whole
            return TakenRequest("text_completion", params, estimated_tokens(prompt), deltas, pass_on)

        await self._engine_service.answer(stream, caller_of, take)

    async def Abort(self, stream: AnyStream) -> None:  # noqa: N802
        """Ends requests by their names; their streams end with the finish reason "abort"."""
        account = self._gate.account_of(stream)
        request = await receive(stream)
        engine = self._engine_service.model().engine
        if len(request.request_ids) > ABORTED_IDS_LIMIT:
            message = (
                f"request_ids holds {len(request.request_ids)} entries: allowed is up to {ABORTED_IDS_LIMIT}"
            )
            raise InvalidRequestError(message, "request_ids")
        for request_id in request.request_ids:
            await engine.abort(account.tenant.own_id(request_id))
        await stream.send_message(pb.AbortResponse())

    async def HealthCheck(self, stream: AnyStream) -> None:  # noqa: N802
        """Says what the readiness of `grpc.health.v1` says."""
        await receive(stream)
        is_ready = self._health.is_ready
        message = "requests are served" if is_ready else "requests are not served now"
        await stream.send_message(pb.HealthCheckResponse(healthy=is_ready, message=message))

    async def GetModelInfo(self, stream: AnyStream) -> None:  # noqa: N802
        """Says what is served."""
        self._gate.account_of(stream)
        await receive(stream)
        description = self._engine_service.model().description
        await stream.send_message(
            pb.GetModelInfoResponse(
                model_path=description.name,
                served_model_name=description.name,
                is_generation=True,
                max_context_length=description.max_model_len,
                max_req_input_len=description.max_model_len - 1,
                vocab_size=description.vocab_size,
                model_type=description.model_type,
                architectures=description.architectures,
                eos_token_ids=description.eos_token_ids,
            )
        )

    async def GetServerInfo(self, stream: AnyStream) -> None:  # noqa: N802
        """Says how it is served; who is no operator is told of its own requests only."""
        caller = self._gate.account_of(stream)
        await receive(stream)
        served = self._engine_service.model()
        accounts = self._gate.accounts() if caller.tenant.operator else [caller]
        await stream.send_message(
            pb.GetServerInfoResponse(
                active_requests=sum(account.num_in_flight for account in accounts),
                uptime_seconds=time.monotonic() - self._start,
                server_type="vllm-grpc",
                data_parallel_size=1,
                block_size=served.description.block_size,
                kv_cache_dtype=served.description.kv_dtype,
                model_dtype=f"torch.{served.description.dtype}",
            )
        )

    async def GetLoads(self, stream: AnyStream) -> None:  # noqa: N802
        """Says how busy the engine is, to operators."""
        self._gate.operator_of(stream)
        await receive(stream)
        served = self._engine_service.model()
        stats = await self._engine_service.stats(served.engine)
        usage = stats.blocks_active / stats.blocks_total if stats.blocks_total else 0.0
        queried = stats.prefix_queried_tokens
        load = pb.SchedulerLoad(
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting,
            num_used_tokens=stats.tokens_held,
            max_total_num_tokens=stats.blocks_total * served.description.block_size,
            token_usage=usage,
            cache_hit_rate=stats.prefix_hit_tokens / queried if queried else 0.0,
        )
        await stream.send_message(
            pb.GetLoadsResponse(
                timestamp=datetime.now(UTC).isoformat(),
                version=served.description.version,
                dp_rank_count=1,
                loads=[load],
            )
        )

    async def GetTokenizer(self, stream: AnyStream) -> None:  # noqa: N802
        """Sends the tokenizer's files, from which the gateway makes its own."""
        account = self._gate.account_of(stream)
        with account.call(), self._one_more_reader(stream):
            await receive(stream)
            make = self._engine_service.model().tokenizer_archive
            if make is None:
                raise GRPCError(Status.UNIMPLEMENTED, "the model has no tokenizer that could be sent")
            async with self._making_archive:
                if self._archive is None:
                    self._archive = await anyio.to_thread.run_sync(make)
                    self._archive_digest = hashlib.sha256(self._archive).hexdigest()
            num_left = len(self._archive)
            for part in tokenizer_chunks(self._archive):
                num_left -= len(part)
                sha256 = "" if num_left else self._archive_digest
                await stream.send_message(common_pb2.GetTokenizerChunk(data=part, sha256=sha256))

    @contextmanager
    def _one_more_reader(self, stream: AnyStream) -> Iterator[None]:
        """Bounds the readers of each tenant, or peer where there are no tenants, so that others find room."""
        sharer, group = sharer_of(stream), group_of(stream)
        if not self._readers.take(sharer, 1, group):
            allowed = f"{MAX_TOKENIZER_READERS} in all, and of those a fair part"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"too many read the tokenizer: allowed is {allowed}")
        try:
            yield
        finally:
            self._readers.give_back(sharer, 1, group)

    async def Embed(self, stream: AnyStream) -> None:  # noqa: N802
        """Not served."""
        await self._refuse(stream, "embeddings are not served")

    async def FlushCache(self, stream: AnyStream) -> None:  # noqa: N802
        """Not served: a cache that several tenants use is not one caller's to empty."""
        await self._refuse(stream, "flushing the cache is not served")

    async def StartProfile(self, stream: AnyStream) -> None:  # noqa: N802
        """Not served."""
        await self._refuse(stream, "profiling is not served")

    async def StopProfile(self, stream: AnyStream) -> None:  # noqa: N802
        """Not served."""
        await self._refuse(stream, "profiling is not served")

    async def SubscribeKvEvents(self, stream: AnyStream) -> None:  # noqa: N802
        """Tells operators which blocks can be found; without events the gateway routes by what it sent where."""
        account = self._gate.operator_of(stream)
        with account.call(needs_operator=True):
            request = await receive(stream)
            block_size = self._engine_service.model().description.block_size
            with self._feed.subscribe(request.start_sequence_number) as subscription:
                async for batch in subscription.batches():
                    for message in batches_of(batch, block_size):
                        await stream.send_message(message)

    async def _refuse(self, stream: AnyStream, message: str) -> None:
        self._gate.account_of(stream)
        raise GRPCError(Status.UNIMPLEMENTED, message)


class _Answer:
    """One request's way back to the gateway.

    Args:
        source: what the engine gives for it; knows the prompt's length.
    """

    def __init__(self, stream: AnyStream, source: DeltaStream) -> None:
        self._stream = stream
        self._source = source
        self._num_output_tokens: dict[int, int] = {}

    async def stream(self, deltas: Deltas) -> None:
        """Sends what is new as it comes.

        Raises:
            FailedSequenceError: a sample failed.
        """
        failed: str | None = None
        async with aclosing(deltas):
            async for delta in deltas:
                self._count(delta)
                if delta.token_ids or delta.prompt_logprobs is not None:
                    await self._stream.send_message(chunk_of(delta, self._source))
                if delta.finish_reason == "error":
                    failed = delta.error or "a sample failed"
                elif delta.finish_reason is not None:
                    await self._stream.send_message(self._complete(delta))
        if failed is not None:
            raise FailedSequenceError(failed)

    async def whole(self, deltas: Deltas) -> None:
        """Sends each sample whole, once all have ended.

        Raises:
            FailedSequenceError: a sample failed.
        """
        samples: dict[int, list[OutputDelta]] = {}
        async with aclosing(deltas):
            async for delta in deltas:
                self._count(delta)
                samples.setdefault(delta.index, []).append(delta)
        for index in sorted(samples):
            sample = merged(samples[index])
            if sample.finish_reason == "error":
                raise FailedSequenceError(sample.error or "a sample failed")
            await self._stream.send_message(self._complete(sample))

    def _count(self, delta: OutputDelta) -> None:
        before = self._num_output_tokens.get(delta.index, 0)
        self._num_output_tokens[delta.index] = before + len(delta.token_ids)
        if delta.usage is not None:
            log_end(delta.finish_reason, delta.usage)

    def _complete(self, sample: OutputDelta) -> pb.GenerateResponse:
        return complete_of(sample, self._source, self._num_output_tokens[sample.index])
