"""How much each call's request may hold: the one table of the sizes of messages and of the lengths of their lists."""

from collections.abc import Mapping

from pykv.sampling.params import LOGIT_BIAS_LIMIT, STOP_STRINGS_LIMIT, STOP_TOKEN_IDS_LIMIT
from pykv.service.transport import MethodLimits
from pykv.text.chat import MESSAGES_LIMIT

__all__ = ["ABORTED_IDS_LIMIT", "LIST_LIMITS", "OTHER_LIST_LIMIT", "PROMPT_IDS", "method_limits"]

SMALL_REQUEST_BYTES = 4096
"""Of a call whose request has a name or two, or nothing."""
ABORT_BYTES = 256 * 1024
ABORTED_IDS_LIMIT = 1024
OTHER_LIST_LIMIT = 1024

LARGE_REQUESTS = frozenset(
    {
        "/pykv.v1.Engine/Generate",
        "/pykv.v1.Engine/Chat",
        "/vllm.grpc.engine.VllmEngine/Generate",
    }
)
"""Calls that carry a prompt: `max_message_size` bounds them, and then the engine's queue."""

MEDIUM_REQUESTS = {"/vllm.grpc.engine.VllmEngine/Abort": ABORT_BYTES}

LIST_LIMITS: Mapping[str, int] = {
    "pykv.v1.ChatRequest.messages": MESSAGES_LIMIT,
    "pykv.v1.SamplingParams.stop": STOP_STRINGS_LIMIT,
    "pykv.v1.SamplingParams.stop_token_ids": STOP_TOKEN_IDS_LIMIT,
    "pykv.v1.SamplingParams.logit_bias": LOGIT_BIAS_LIMIT,
    "vllm.grpc.engine.SamplingParams.stop": STOP_STRINGS_LIMIT,
    "vllm.grpc.engine.SamplingParams.stop_token_ids": STOP_TOKEN_IDS_LIMIT,
    "vllm.grpc.engine.SamplingParams.logit_bias": LOGIT_BIAS_LIMIT,
    "vllm.grpc.engine.AbortRequest.request_ids": ABORTED_IDS_LIMIT,
}
"""The most entries of a list, by the full name of its field; of one that is not here, OTHER_LIST_LIMIT."""

PROMPT_IDS = frozenset({"pykv.v1.TokenIds.ids", "vllm.grpc.engine.TokenizedInput.input_ids"})
"""Lists that the model's context cap bounds."""


def method_limits(path: str, most: int) -> MethodLimits:
    """The bounds of one method's calls.

    Args:
        path: of the method.
        most: bytes of a message of any method.
    """
    if path in LARGE_REQUESTS:
        return MethodLimits(most, is_queued=True)
    return MethodLimits(min(MEDIUM_REQUESTS.get(path, SMALL_REQUEST_BYTES), most))
