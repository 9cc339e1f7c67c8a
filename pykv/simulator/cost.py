"""How long a step takes: a formula with a few parts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pykv.errors import ConfigError
from pykv.field_checks import as_boolean, as_integer, as_number_in
from pykv.simulator.cost_text import cost_parts, saved_parts

__all__ = ["CostModel"]

_MOST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step: `fixed + sequences + swaps + (compute and memory)`.

    Attributes:
        fixed: of every step.
        per_sequence: of each sequence in the batch.
        per_token: compute, of each token.
        per_pair: compute, of each (token, token that it attends to).
        weights: memory, of reading the weights that every step reads.
        experts: memory, of reading all experts: a step reads those that one of its tokens is sent to.
        expert_share: the share of the experts that one token is sent to, any as likely as another; from 0 to 1.
        per_context_token: memory, of each token whose keys and values are read.
        window: tokens that layers with a window see; 0: there is no such layer.
        per_window_pair, per_window_token: as per_pair and per_context_token, of the layers with a window, which see no
            more than it.
        per_swapped_block: of each block that is copied to or from the host.
        overlaps: whether the larger of compute and memory counts, as in a roofline, or their sum.
    """

    fixed: float = 0.0
    per_sequence: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    weights: float = 0.0
    experts: float = 0.0
    expert_share: float = 0.0
    per_context_token: float = 0.0
    window: int = 0
    per_window_pair: float = 0.0
    per_window_token: float = 0.0
    per_swapped_block: float = 0.0
    overlaps: bool = False

    def __post_init__(self) -> None:
        as_boolean("overlaps", self.overlaps, ConfigError)
        object.__setattr__(self, "window", as_integer("window", self.window, 0, 2**30, ConfigError))
        for name in (field.name for field in fields(self) if field.name not in ("overlaps", "window")):
            most = 1.0 if name == "expert_share" else _MOST_SECONDS
            object.__setattr__(self, name, as_number_in(name, getattr(self, name), 0.0, most, ConfigError))

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """The model that a text names.

        Args:
            text: `constant:SECONDS`; `linear:FIELD=SECONDS,...`; `roofline:GPU,model=NAME`, both by the names of
                `pykv plan`, or in the place of the model `parameters=N,kv_bytes=N`; or the path of a JSON file.

        Raises:
            ConfigError: the text is none of these.
        """
        return cls._of(cost_parts(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Reads a file that `save` or `pykv fit` wrote.

        Raises:
            ConfigError: it is no such file.
            OSError: it cannot be read.
        """
        return cls._of(saved_parts(path))

    @classmethod
    def _of(cls, parts: object) -> CostModel:
        known = {field.name for field in fields(cls)}
        if not isinstance(parts, dict) or (unknown := sorted(set(parts) - known)):
            found = unknown if isinstance(parts, dict) else parts
            raise ConfigError(f"cost model: {found} is unknown: allowed are {', '.join(sorted(known))}")
        return cls(**parts)

    def save(self, path: str | os.PathLike[str], **about: Any) -> None:
        """Writes a JSON file.

        Args:
            path: of the file.
            about: what else to write beside the model.

        Raises:
            OSError: it cannot be written.
        """
        Path(path).write_text(json.dumps({"cost_model": asdict(self), **about}, indent=2) + "\n")
