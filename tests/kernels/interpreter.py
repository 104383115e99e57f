"""Repairs of Triton's CPU interpreter (seen in 3.6.0): without them bf16 and fp8 kernels compute silent garbage.

`repair()` puts in every entry of `REPAIRS`; `without(name)` takes one out again for a while, which is how
`triton_suite/test_repairs.py` shows that each is still needed. Import only where TRITON_INTERPRET=1 was set before
Triton was imported (`triton_suite/conftest.py`). numpy has no bf16 or fp8, so the interpreter carries their raw bits
in unsigned integers; the repairs convert them through torch, which rounds to nearest even as the hardware does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter as upstream

Array = NDArray[Any]
Handle = upstream.TensorHandle
Builder = upstream.InterpreterBuilder

_TORCH_TYPE = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_RAW = {tl.bfloat16} | {dtype for dtype in _TORCH_TYPE if dtype.primitive_bitwidth == 8}
"""Types that numpy lacks: carried as bits."""
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_raw(*handles: Any) -> bool:
    return any(handle.dtype.scalar in _RAW for handle in handles)


def _decode(data: Array, dtype: Any) -> torch.Tensor:
    bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.dtype.itemsize}").copy())
    return bits.view(_TORCH_TYPE[dtype]).reshape(data.shape)


def _encode(values: torch.Tensor, dtype: Any) -> Array:
    """Rounded to nearest even; fp8 saturates, as PTX's `cvt.rn.satfinite` does (torch gives NaN)."""
    target = _TORCH_TYPE[dtype]
    if dtype.primitive_bitwidth == 8:
        largest = torch.finfo(target).max
        values = values.float().clamp(-largest, largest)  # NaN stays NaN
    bits = values.to(target).contiguous().view(_INTEGER[target.itemsize])
    return bits.numpy().view(upstream._get_np_dtype(dtype))


def _values(handle: Any) -> Array:
    """What the handle means, as numbers that numpy can calculate with."""
    if not _is_raw(handle):
        return handle.data
    return _decode(handle.data, handle.dtype.scalar).float().numpy()


def _handle(values: Array, dtype: Any) -> Any:
    wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(np.shape(values))
    return Handle(_encode(wide, dtype), dtype)


def _convert_float(data: Array, source: Any, target: Any, rounding: Any) -> Array:
    values = _decode(data, source)
    if rounding == upstream._ir.ROUNDING_MODE.RTZ and target == tl.bfloat16:
        values = (values.float().view(torch.int32) & -65536).view(torch.float32)
    return _encode(values, target).view(f"u{target.primitive_bitwidth // 8}")


def _cast_impl(self: Any, source: Any, target_type: Any) -> Any:
    target = target_type.scalar
    if source.dtype.scalar == target:
        return Handle(source.data, target)
    if target in _RAW:
        return _handle(_values(source), target)
    if _is_raw(source):
        return Handle(_values(source).astype(upstream._get_np_dtype(target)), target)
    return _UPSTREAM["cast_impl"](self, source, target_type)


def _binary_op(self: Any, left: Any, right: Any, op: Callable[..., Array]) -> Any:
    if not _is_raw(left, right):
        return _UPSTREAM["binary_op"](self, left, right, op)
    result = op(_values(left), _values(right))
    return Handle(result, tl.int1) if result.dtype == np.bool_ else _handle(result, left.dtype.scalar)


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    if not _is_raw(x, y, z):
        return _UPSTREAM["create_fma"](self, x, y, z)
    return _handle(_values(x) * _values(y) + _values(z), z.dtype.scalar)


def _create_dot(self: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
    if not _is_raw(a, b):
        return _UPSTREAM["create_dot"](self, a, b, accumulator, *options)
    product = np.matmul(_values(a), _values(b), dtype=np.float32)
    return Handle(product + accumulator.data, accumulator.dtype.scalar)


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of shape (1,) there, which numpy >= 2.4 refuses to turn into int or bool."""
    _UPSTREAM["_patch_lang_tensor"](tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))
    scope.set_attr(tensor, "__bool__", lambda self: self.handle.data.size != 1 or bool(self.handle.data.reshape(-1)[0]))


REPAIRS: dict[str, tuple[Any, str, Any]] = {
    "numpy scalars": (upstream, "_patch_lang_tensor", _patch_lang_tensor),
    "bf16 arithmetic": (Builder, "binary_op", _binary_op),
    "bf16 fma": (Builder, "create_fma", _create_fma),
    "bf16 dot": (Builder, "create_dot", _create_dot),
    "bf16 from and to integers": (Builder, "cast_impl", _cast_impl),
    "rounding to bf16 and fp8": (upstream, "_convert_float", _convert_float),
}
"""Fault -> (owner, attribute, replacement)."""
_UPSTREAM = {name: getattr(owner, name) for owner, name, _ in REPAIRS.values()}


def repair() -> None:
    """Put every repair in. Call once in a process, before the first kernel is launched."""
    for owner, name, replacement in REPAIRS.values():
        setattr(owner, name, replacement)


@contextmanager
def without(fault: str) -> Iterator[None]:
    """Triton as it ships, in this one respect."""
    owner, name, replacement = REPAIRS[fault]
    setattr(owner, name, _UPSTREAM[name])
    try:
        yield
    finally:
        setattr(owner, name, replacement)
