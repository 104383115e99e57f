"""Triton, where it is of use: on a GPU, under the interpreter, or in the compile gate. Elsewhere, nothing is imported.

A kernel file writes `from slipring.kernels.jit import tl, triton` and decorates with `@triton.jit`. On a machine
where no kernel can run, a worker should not spend a third of a second on importing Triton, so both names are then
stand-ins: decorated functions stay plain functions that nobody calls, since every wrapper `x` goes by the device of
its tensors.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any, TypeAlias

import torch


def wanted() -> bool:
    """Whether kernels can run or be compiled in this process."""
    if os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("SLIPRING_COMPILE_KERNELS") == "1":
        return importlib.util.find_spec("triton") is not None
    return torch.cuda.is_available()


class _Absent:
    """Answers every attribute with itself, and decorates by returning the function as it is."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self


if TYPE_CHECKING:
    # Triton's annotations describe host code; kernels are another language, of which a type checker knows nothing.
    class _Untyped(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Untyped):
        constexpr: TypeAlias = Any

    class triton(metaclass=_Untyped): ...

elif wanted():
    import triton
    import triton.language as tl
else:
    triton = tl = _Absent()

__all__ = ["tl", "triton", "wanted"]
