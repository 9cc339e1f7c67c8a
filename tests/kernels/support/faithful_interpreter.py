"""Makes Triton's interpreter compute bfloat16 and fp8 as a GPU does; for tests and dry runs only.

The interpreter keeps such numbers as their bits in unsigned integers. Arithmetic on them then works on the bits, a
conversion to bfloat16 truncates, and one to fp8 neither carries nor saturates. Here every value is widened to float32
before an operation and narrowed after it, and every conversion is torch's, saturated where a GPU saturates.

It also patches the language once a launch, where the interpreter does it at each call of a device function, and copies
no argument that is in host memory already.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_TORCH_TYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_FP8 = (tl.float8e4nv, tl.float8e5)
_AS_BITS = (tl.bfloat16, *_FP8)
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)
_SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_TORCH_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any = None) -> np.ndarray:
    """Converts between float types, to nearest even; the result is the bits, as unsigned integers."""
    nearest = interpreter._ir.ROUNDING_MODE.RTNE
    if source not in _TORCH_TYPES or target not in _TORCH_TYPES or rounding not in (None, nearest):
        raise NotImplementedError(f"conversion from {source} to {target} with rounding {rounding}")
    bits = np.ascontiguousarray(data)
    flat = torch.from_numpy(bits.reshape(-1).view(_SIGNED[bits.itemsize]).copy())
    values = flat.view(_TORCH_TYPES[source])
    if target in _FP8:
        largest = torch.finfo(_TORCH_TYPES[target]).max
        wide = values.to(torch.float64 if source == tl.float64 else torch.float32)
        values = torch.where(wide.isnan(), wide, wide.clamp(-largest, largest))
    result = values.to(_TORCH_TYPES[target])
    size = result.element_size()
    return result.view(_TORCH_INTEGERS[size]).numpy().view(_UNSIGNED[size]).reshape(np.shape(data))


def _wide(handle: interpreter.TensorHandle) -> np.ndarray:
    """The values of a handle, as numbers."""
    kind = handle.dtype.scalar
    return convert_float(handle.data, kind, tl.float32).view(np.float32) if kind in _AS_BITS else handle.data


def _narrow(values: np.ndarray, kind: tl.dtype) -> interpreter.TensorHandle:
    """Numbers as a handle of a type that is kept as bits."""
    return interpreter.TensorHandle(convert_float(np.asarray(values, np.float32), tl.float32, kind), kind)


class FaithfulBuilder(interpreter.InterpreterBuilder):
    """The interpreter's operations, with bfloat16 and fp8 as numbers."""

    def cast_impl(self, source: Any, target_type: Any) -> interpreter.TensorHandle:
        source_kind, target_kind = source.dtype.scalar, target_type.scalar
        if source_kind in _TORCH_TYPES and target_kind in _TORCH_TYPES:
            return self.create_fp_to_fp(source, target_type, None)
        if target_kind in _AS_BITS:
            return _narrow(source.data, target_kind)
        if source_kind not in _AS_BITS:
            return super().cast_impl(source, target_type)
        values = _wide(source).astype(interpreter._get_np_dtype(target_kind))
        return interpreter.TensorHandle(values, target_kind)

    def create_fp_to_fp(self, source: Any, target_type: Any, rounding: Any) -> interpreter.TensorHandle:
        kind = target_type.scalar
        bits = convert_float(source.data, source.dtype.scalar, kind, rounding)
        return interpreter.TensorHandle(bits.view(interpreter._get_np_dtype(kind)), kind)

    def binary_op(self, left: Any, right: Any, operation: Callable[..., Any]) -> interpreter.TensorHandle:
        kind = left.dtype.scalar
        if kind not in _AS_BITS or operation in _BITWISE:
            return super().binary_op(left, right, operation)
        values = operation(_wide(left), _wide(right))
        return (
            interpreter.TensorHandle(values, tl.int1) if values.dtype == np.bool_ else _narrow(values, kind)
        )

    def unary_op(self, operand: Any, operation: Callable[..., Any]) -> interpreter.TensorHandle:
        kind = operand.dtype.scalar
        if kind not in _AS_BITS:
            return super().unary_op(operand, operation)
        return _narrow(operation(_wide(operand)), kind)

    def create_fma(self, x: Any, y: Any, z: Any) -> interpreter.TensorHandle:
        kind = z.dtype.scalar
        return (
            _narrow(_wide(x) * _wide(y) + _wide(z), kind) if kind in _AS_BITS else super().create_fma(x, y, z)
        )

    def create_dot(self, a: Any, b: Any, d: Any, *rest: Any) -> interpreter.TensorHandle:
        product = np.matmul(_wide(a), _wide(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


class FaithfulReduce(interpreter.ReduceOps):
    """Refuses what it would get wrong; the kernels reduce in float32."""

    def apply_impl(self, operands: Any) -> Any:
        if any(operand.dtype.scalar in _AS_BITS for operand in operands):
            raise NotImplementedError(f"reduction of {operands[0].dtype}")
        return super().apply_impl(operands)


class PatchedOnce:
    """What has been patched for the launch that runs, by the globals of the functions called."""

    def __init__(self) -> None:
        self.scopes: dict[int, Any] | None = None

    def launch(self, run: Callable[[], None]) -> None:
        """Runs a grid; everything that is patched meanwhile is restored after it."""
        self.scopes = {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", RuntimeWarning
                )  # a GPU computes with NaN and infinity in silence
                run()
        finally:
            for scope in reversed(list(self.scopes.values())):
                scope.restore()
            self.scopes = None

    def patch(self, function: Any) -> None:
        """Patches the language as this function sees it, unless this launch has done so already."""
        if self.scopes is not None and id(function.__globals__) not in self.scopes:
            self.scopes[id(function.__globals__)] = interpreter._patch_lang(function)


def install() -> None:
    """Mends the interpreter of this process; TRITON_INTERPRET must have been set before triton was imported.

    Raises:
        RuntimeError: the kernels of this process are compiled, not interpreted.
    """
    import triton

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 must be set before triton is imported")
    if isinstance(interpreter.interpreter_builder, FaithfulBuilder):
        return
    interpreter._convert_float = convert_float
    interpreter.ReduceOps = FaithfulReduce
    interpreter.interpreter_builder = FaithfulBuilder()
    # The overflow check is computed for every integer operation and used in debug mode only.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_semantic = TritonSemantic(interpreter.interpreter_builder)
    _patch_once_a_launch()
    _keep_host_arguments()
    _index_by_one_element()


def _patch_once_a_launch() -> None:
    patched = PatchedOnce()
    run_grid = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.launch(lambda: run_grid(self, *args, **kwargs))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call


def _keep_host_arguments() -> None:
    def as_they_are(self: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        return list(args), dict(kwargs)

    def nothing(self: Any, *args: Any) -> None:
        return None

    interpreter.GridExecutor._init_args_hst = as_they_are
    interpreter.GridExecutor._restore_args_dev = nothing


def _index_by_one_element() -> None:
    """numpy 2.4 and newer refuse int() of an array of one element, which older interpreters ask for."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
