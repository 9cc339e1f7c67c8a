"""Copies of blocks on a stream of their own, in order with the model's steps."""

from __future__ import annotations

from collections.abc import Callable

from pykv.engine.device.interface import Device


class BlockCopies:
    """Launches copies of blocks beside the model.

        # model  | step n ......... |waits| step n + 1
        # copies                    | swap out, swap in, copy |

    The first copy of a step waits for what the model's stream was given before: it wrote what is copied. What the
    model's stream is given after `join` waits for all copies: it may read what they brought, and write where they have
    read.
    """

    def __init__(self, device: Device) -> None:
        self._compute = device.compute
        self._stream = device.new_stream()
        self._outstanding = False

    def run(self, copy: Callable[[], None]) -> None:
        """Launches one copy behind those before it."""
        if not self._outstanding:
            self._stream.wait(self._compute.record())
            self._outstanding = True
        self._stream.run(copy)

    def join(self) -> None:
        """Makes the model's stream wait for all copies that were launched; nothing where there are none."""
        if self._outstanding:
            self._compute.wait(self._stream.record())
            self._outstanding = False
