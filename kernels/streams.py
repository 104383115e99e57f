"""CuPy-managed CUDA streams and events, and the only place that imports CuPy: at first use, never at import.

torch launches on the current stream, and so does CuPy; entering a `Stream` makes it current for both. Streams do not
wait for the legacy default stream. Order between them is only what events say.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import TracebackType
from typing import Any

import torch

INSTALL = "pip install 'slipring[cuda]'"


class NoCuda(RuntimeError):
    """What is missing, and the command that fixes it or says why."""


@functools.cache
def cupy() -> Any:
    """The module. Raises NoCuda where it is not installed, or finds no device."""
    if importlib.util.find_spec("cupy") is None:
        raise NoCuda(f"CuPy is not installed, and GPU streams and communication need it: {INSTALL}")
    module = importlib.import_module("cupy")
    if not module.cuda.is_available():
        raise NoCuda("CuPy finds no CUDA device here; `slipring doctor` says what is missing")
    return module


def cuda_runtime() -> Any:
    """`cupy.cuda.runtime`: malloc, free, memset, IPC handles. Raises NoCuda."""
    return cupy().cuda.runtime


class Event:
    """A point in a stream. Reusable: recording again moves it. Keeps no timing."""

    def __init__(self) -> None:
        self.raw = cupy().cuda.Event(disable_timing=True)

    @property
    def done(self) -> bool:
        """Whether the work before the point is complete."""
        return self.raw.done

    def synchronize(self) -> None:
        """Block this thread until it is."""
        self.raw.synchronize()


class Stream:
    """A CuPy stream on the current device, seen by torch as an external one. A lower `priority` number goes first."""

    def __init__(self, priority: int = 0) -> None:
        self.raw = cupy().cuda.Stream(non_blocking=True, priority=priority)
        # torch does not own it: `raw` must live as long as `torch`, so both are members of one object.
        self.torch = torch.cuda.ExternalStream(self.raw.ptr)
        self._entered: list[Any] = []

    def __enter__(self) -> Stream:
        context = torch.cuda.stream(self.torch)
        context.__enter__()
        self.raw.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.raw.__exit__(kind, error, at)
        self._entered.pop().__exit__(kind, error, at)

    def record(self, event: Event) -> Event:
        """Move `event` behind everything launched on this stream so far."""
        event.raw.record(self.raw)
        return event

    def wait(self, event: Event) -> None:
        """What is launched from here on starts after `event`. Does not block the thread."""
        self.raw.wait_event(event.raw)

    def synchronize(self) -> None:
        self.raw.synchronize()
