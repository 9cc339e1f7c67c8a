"""How the next token is chosen: a request's parameters, and the sampler of a whole batch."""

from __future__ import annotations

from pykv.sampling.params import SamplingParams

__all__ = ["SamplingParams"]
