"""What Triton's interpreter does not look at, and a GPU punishes: addresses and shift widths.

`watch()` makes every load, store and atomic operation of an interpreted kernel fail when it touches memory outside of
the tensors that the launch was given (a small step outside is silent otherwise, a large one a crash), and every shift
by more bits than a number has (undefined when compiled). Kernels with a table of peers' addresses are left alone.
`overflows()` also checks additions and products of 32-bit integers, which costs several times as much.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter as upstream

Builder = upstream.InterpreterBuilder
Array = NDArray[Any]
_begins: Array | None = None
_ends: Array | None = None
"""Of the memory that the kernel at hand may touch, in rising order; None: any."""


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    span = sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (span + 1) * tensor.element_size()


def _note(tensors: list[torch.Tensor]) -> None:
    """Extents may overlap (views of one buffer): what they cover together counts."""
    global _begins, _ends
    merged: list[list[int]] = []
    for begin, end in sorted(_extent(tensor) for tensor in tensors if tensor.numel()):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    _begins, _ends = np.array(merged, np.uint64).reshape(-1, 2).T


def _check(pointers: Any, mask: Array) -> None:
    if _begins is None or _ends is None:
        return
    data, mask = np.broadcast_arrays(pointers.data, mask)
    used = data[mask.astype(bool)].astype(np.uint64)
    width = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
    at = np.searchsorted(_begins, used, side="right") - 1
    outside = (at < 0) | (used + width > _ends[at])
    if outside.any():
        raise IndexError(f"{int(outside.sum())} of {used.size} addresses lie outside of the kernel's tensors")


def watch() -> None:
    """Call once in a process, after `interpreter.repair`."""
    init_args = upstream.GridExecutor._init_args_hst
    load, store = Builder.create_masked_load, Builder.create_masked_store
    cas, rmw = Builder.create_atomic_cas, Builder.create_atomic_rmw

    def note_args(self: Any, args: Any, kwargs: Any) -> Any:
        global _begins, _ends
        found = init_args(self, args, kwargs)
        _begins = _ends = None
        if "PEERS" not in inspect.getfullargspec(self.fn).args:
            _note([x for x in (*found[0], *found[1].values()) if isinstance(x, torch.Tensor)])
        return found

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask.data)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask.data)
        return store(self, pointers, value, mask, *rest)

    def checked_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        _check(pointers, np.ones_like(pointers.data, bool))
        return cas(self, pointers, *rest)

    def checked_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask.data)
        return rmw(self, op, pointers, value, mask, *rest)

    upstream.GridExecutor._init_args_hst = note_args
    Builder.create_masked_load, Builder.create_masked_store = checked_load, checked_store
    Builder.create_atomic_cas, Builder.create_atomic_rmw = checked_cas, checked_rmw
    for name in ("create_shl", "create_lshr", "create_ashr"):
        setattr(Builder, name, _checked_shift(getattr(Builder, name)))


def _checked_shift(shift: Any) -> Any:
    def checked(self: Any, left: Any, right: Any) -> Any:
        bits, by = left.dtype.scalar.primitive_bitwidth, right.data.astype(np.int64)
        if ((by < 0) | (by >= bits)).any():
            raise ArithmeticError(f"a number of {bits} bits is shifted by {by.min()} to {by.max()}")
        return shift(self, left, right)

    return checked


@contextmanager
def overflows() -> Iterator[None]:
    """Within: a 32-bit sum, difference or product that wraps is an error."""
    builder = upstream.interpreter_builder
    before, builder.options = builder.options, dataclasses.replace(builder.options, debug=True)
    try:
        yield
    finally:
        builder.options = before
