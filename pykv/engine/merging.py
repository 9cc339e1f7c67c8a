"""Makes one delta of several that follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from pykv.engine.outputs import OutputDelta


def merged(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Returns one delta with everything that these deltas of one sample say, in their order."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    has_logprobs = any(delta.logprobs is not None for delta in deltas)
    return OutputDelta(
        request_id=first.request_id,
        index=first.index,
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(chain.from_iterable(delta.logprobs or () for delta in deltas))
        if has_logprobs
        else None,
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        usage=last.usage,
        error=last.error,
        prompt_token_ids=first.prompt_token_ids,
    )
