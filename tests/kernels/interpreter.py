"""Repairs of Triton's CPU interpreter (seen in 3.6.0): without them bf16 and fp8 kernels compute silent garbage, fp32
products are better than a GPU's, and NaN survives where a GPU's maximum drops it.

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
    return _UPSTREAM["bf16 from and to integers"](self, source, target_type)


def _binary_op(self: Any, left: Any, right: Any, op: Callable[..., Array]) -> Any:
    if not _is_raw(left, right):
        return _UPSTREAM["bf16 arithmetic"](self, left, right, op)
    result = op(_values(left), _values(right))
    return Handle(result, tl.int1) if result.dtype == np.bool_ else _handle(result, left.dtype.scalar)


def _create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    if not _is_raw(x, y, z):
        return _UPSTREAM["bf16 fma"](self, x, y, z)
    return _handle(_values(x) * _values(y) + _values(z), z.dtype.scalar)


def _create_dot(self: Any, a: Any, b: Any, accumulator: Any, precision: Any, *options: Any) -> Any:
    if a.dtype.scalar == tl.float32 and precision != _PRECISION.IEEE:
        product = _tf32_product(a.data, b.data, is_split=precision == _PRECISION.TF32x3)
    elif _is_raw(a, b):
        product = np.matmul(_values(a), _values(b), dtype=np.float32)
    else:
        return _UPSTREAM["bf16 dot, fp32 dot in TF32"](self, a, b, accumulator, precision, *options)
    return Handle(product + accumulator.data, accumulator.dtype.scalar)


def _tf32_product(a: Array, b: Array, is_split: bool) -> Array:
    """As NVIDIA's matrix units make it of fp32: rounded to 10 bits; or, split in two such parts, in three products
    (the smallest with the smallest is left out). How the units round their sums is not modelled."""
    big_a, big_b = _to_tf32(a), _to_tf32(b)
    product = np.matmul(big_a, big_b, dtype=np.float32)
    if is_split:
        small = np.matmul(_to_tf32(a - big_a), big_b) + np.matmul(big_a, _to_tf32(b - big_b))
        product += np.nan_to_num(small, nan=0.0)  # of infinite numbers; the large product says what they give
    return product


def _to_tf32(x: Array) -> Array:
    """`cvt.rna.tf32.f32`."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isfinite(x), ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32), x)


def _reduce(self: Any, data: Any) -> Any:
    """argmax by comparisons, which NaN never wins: a GPU's answer is then any index, here the worst of them."""
    if self.combine_fn is not tl.standard._argmax_combine_tie_break_left or not np.isnan(data[0].handle.data).any():
        return _UPSTREAM["argmax of NaN"](self, data)
    values = data[0].handle.data
    broken = np.isnan(values).any(axis=self.axis, keepdims=self.keep_dims)
    at = np.where(broken, values.shape[self.axis] - 1, np.argmax(values, self.axis, keepdims=self.keep_dims))
    best = np.max(values, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(best, data[0].dtype), self.to_tensor(at.astype(np.int32), tl.int32)


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Scalars are arrays of shape (1,) there, which numpy >= 2.4 refuses to turn into int or bool."""
    _UPSTREAM["numpy scalars"](tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))
    scope.set_attr(tensor, "__bool__", lambda self: self.handle.data.size != 1 or bool(self.handle.data.reshape(-1)[0]))


REPAIRS: dict[str, tuple[Any, str, Any]] = {
    "numpy scalars": (upstream, "_patch_lang_tensor", _patch_lang_tensor),
    "bf16 arithmetic": (Builder, "binary_op", _binary_op),
    "bf16 fma": (Builder, "create_fma", _create_fma),
    "bf16 dot, fp32 dot in TF32": (Builder, "create_dot", _create_dot),
    "maximum of NaN": (Builder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, np.fmax)),
    "minimum of NaN": (Builder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin)),
    "argmax of NaN": (upstream.ReduceOps, "apply_impl", _reduce),
    "bf16 from and to integers": (Builder, "cast_impl", _cast_impl),
    "rounding to bf16 and fp8": (upstream, "_convert_float", _convert_float),
}
"""Fault -> (owner, attribute, replacement)."""
_UPSTREAM = {fault: getattr(owner, name) for fault, (owner, name, _) in REPAIRS.items()}
_PRECISION = upstream._ir.INPUT_PRECISION


def repair() -> None:
    """Put every repair in. Call once in a process, before the first kernel is launched."""
    for owner, name, replacement in REPAIRS.values():
        setattr(owner, name, replacement)


@contextmanager
def without(fault: str) -> Iterator[None]:
    """Triton as it ships, in this one respect."""
    owner, name, replacement = REPAIRS[fault]
    setattr(owner, name, _UPSTREAM[fault])
    try:
        yield
    finally:
        setattr(owner, name, replacement)
