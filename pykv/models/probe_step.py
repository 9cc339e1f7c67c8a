"""A step that checks how the attention layers call it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pykv.errors import UnsupportedModelError
from pykv.layout import KvLayer
from pykv.models.step_context import StepContext

__all__ = ["ProbeStep"]


@dataclass
class ProbeStep(StepContext):
    """As its base; each layer must run once, with the heads, sizes and window that the layout gives it."""

    _seen: list[int] = field(init=False, default_factory=list)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `StepContext.attend`.

        Raises:
            UnsupportedModelError: the layer is none of the layout's, or has another shape or window.
        """
        layers = self.pool.layout.layers
        if not isinstance(layer, int) or not 0 <= layer < len(layers):
            raise UnsupportedModelError(
                f"check 'layout': the model has a layer {layer!r}, the config {len(layers)}"
            )
        found = KvLayer(key.shape[1], key.shape[2], value.shape[2], window, layers[layer].reads_layer)
        if found != layers[layer]:
            raise UnsupportedModelError(
                f"check 'layout': layer {layer} attends with {found}, but its config says {layers[layer]}"
            )
        self._seen.append(layer)
        return super().attend(
            layer, query, key, value, scale=scale, window=window, softcap=softcap, sinks=sinks
        )

    def check_calls(self) -> None:
        """To be called after the model's forward.

        Raises:
            UnsupportedModelError: not every layer of the layout attended exactly once.
        """
        num_layers = self.pool.layout.num_layers
        if sorted(self._seen) != list(range(num_layers)):
            raise UnsupportedModelError(
                f"check 'attention calls': {len(self._seen)} calls of pykv's attention in {num_layers} "
                "layers; each layer must call it once"
            )
