"""A backend that the machine cannot run on a device is refused, with what it lacks and what runs there."""

from __future__ import annotations

import pytest
import torch

from pykv.attention import copy_blocks, write_kv
from pykv.attention.backends import backend_for

triton = pytest.importorskip("triton")


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="Triton's interpreter serves the CPU")
def test_a_backend_that_the_machine_cannot_run_is_refused():
    message = (
        r"backend is 'triton', but the Triton kernels run on GPUs .*: allowed for 'cpu' is 'torch', 'cpu'"
    )
    cache, rows = torch.zeros(5, 2, 4, 8), torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match=message):
        write_kv(rows, rows, cache, cache.clone(), torch.tensor([1]), backend="triton")
    for pairs in (torch.tensor([[1, 2]]), torch.zeros(0, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match=message):
            copy_blocks([cache], [cache.clone()], pairs, backend="triton")


def test_what_is_not_on_the_cpu_is_no_cpu_backends():
    message = r"attention_backend is 'cpu', but the CPU kernels .*: allowed for 'mps' is 'torch'"
    with pytest.raises(ValueError, match=message):
        backend_for("cpu", torch.device("mps"), torch.float32, option="attention_backend")
    with pytest.raises(ValueError, match=r"backend is 'auto', but tensors on 'meta' hold nothing: .*is none"):
        backend_for("auto", torch.device("meta"), torch.float32)


def test_a_gpu_without_its_driver_is_no_triton_backends(monkeypatch):
    class Nothing:
        @property
        def active(self):
            raise RuntimeError("0 active drivers ([])")

    monkeypatch.setattr(triton.runtime, "driver", Nothing())
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    message = (
        r"backend is 'triton', but Triton cannot use the GPU: 0 active .*: allowed for 'cuda' is 'torch'"
    )
    with pytest.raises(ValueError, match=message):
        backend_for("triton", torch.device("cuda"), torch.float16)
