"""The device plug: streams, events, pinned and registered memory, graphs. The only file that calls CUDA by name.

`CudaDevice` is one GPU, with one stream of our own for all of a worker's work (a capture may not run on the default
stream). `HostDevice` is its null twin: memory is the host's, work is done when it is enqueued, and a captured body
runs when it is replayed, and not before, as on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.kernels.spec import ARCHITECTURES
from slipring.kernels.tiles import current_architecture
from slipring.workers.link import StartRefused

Body = Callable[[], None]
"""Device work; to be captured, it reads and writes buffers of fixed addresses and sizes, and waits for nothing."""


class Event(Protocol):
    """A point in the stream, with its time."""

    def synchronize(self) -> None:
        """Block the calling thread, without the interpreter's lock, until the work before the point is done."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this point to `end_event`; both must be done."""
        ...


class Graph(Protocol):
    def replay(self) -> None:
        """Enqueue the captured work."""
        ...


class Device(Protocol):
    torch: torch.device
    num_processors: int

    def activate(self) -> None:
        """Make this device and its stream current for the calling thread."""
        ...

    def record(self) -> Event:
        """An event behind all that is enqueued so far."""
        ...

    def upload(self, array: NDArray[Any]) -> Tensor:
        """A device copy of a small array, which may be changed at once. Does not wait for the device."""
        ...

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device writes to without the host's help; zeroed."""
        ...

    def capture(self, body: Body) -> Graph:
        """Record `body` without running it. Raises what it raises, and keeps nothing then."""
        ...

    def register(self, memory: memoryview) -> None:
        """Let the device copy from this range without staging, until `close`. Raises RuntimeError if it is refused."""
        ...

    def free_bytes(self) -> int:
        """Device memory that can still be allocated. For start-up: gives what torch holds unused back first."""
        ...

    def peak_bytes(self, body: Body) -> int:
        """Most memory that running `body` takes beyond what was held before. For start-up."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None:
        """Wait for all work, then unregister."""
        ...


class CudaDevice:
    def __init__(self, name: str) -> None:
        """`name`: cuda:N. Raises StartRefused when there is no such device, or our kernels are not made for it."""
        if not torch.cuda.is_available():
            raise StartRefused(f"--device {name}: torch finds no CUDA device; `slipring doctor` says what is missing")
        self.torch = torch.device(name)
        if self.torch.index >= (count := torch.cuda.device_count()):
            raise StartRefused(f"--device {name}: torch finds {count} CUDA devices, the last one is cuda:{count - 1}")
        torch.cuda.set_device(self.torch)
        if (found := current_architecture()) not in ARCHITECTURES:
            raise StartRefused(f"--device {name} is {found}; the kernels are made for {', '.join(ARCHITECTURES)}")
        self.num_processors = torch.cuda.get_device_properties(self.torch).multi_processor_count
        self._stream = torch.cuda.Stream(self.torch)
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._pool_keeper: Any = None
        self._registered: list[int] = []

    def activate(self) -> None:
        torch.cuda.set_device(self.torch)
        torch.cuda.set_stream(self._stream)

    def record(self) -> Event:
        # Not a blocking event: the wait spins, which saves the wake-up's tens of microseconds a step.
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def upload(self, array: NDArray[Any]) -> Tensor:
        # torch's pinned allocator hands a buffer out again only after the copies that read it.
        return torch.from_numpy(array).pin_memory().to(self.torch, non_blocking=True)

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def capture(self, body: Body) -> Graph:
        # A pool dies with its last graph, and torch does not revive one: were the first capture interrupted, all later
        # ones would fail. A graph of next to nothing keeps it.
        if self._pool_keeper is None:
            word = torch.zeros(1, device=self.torch)
            self._pool_keeper = self._record(word.zero_)
        return self._record(body)

    def _record(self, body: Callable[[], Any]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: that one first gives the allocator's cache back, which the next step would have to get
        # again. thread_local: what other threads ask of the driver does not void the capture.
        graph.capture_begin(pool=self._graph_pool, capture_error_mode="thread_local")
        try:
            body()
        finally:
            graph.capture_end()
        return graph

    def register(self, memory: memoryview) -> None:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        code = _cudart().cudaHostRegister(address, memory.nbytes, 0)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister of {memory.nbytes / 2**20:.1f} MiB: {code} ({int(code)})")
        self._registered.append(address)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch)[0]

    def peak_bytes(self, body: Body) -> int:
        # As the driver sees it: what torch reserves in whole segments, code that is loaded, and workspaces count too.
        # torch keeps what it has reserved, so it is all still there afterwards.
        self.synchronize()
        before = self.free_bytes()
        body()
        self.synchronize()
        return max(0, before - torch.cuda.mem_get_info(self.torch)[0])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def close(self) -> None:
        try:
            self.synchronize()
        finally:  # which raises what ended the work, if something did
            while self._registered:
                _cudart().cudaHostUnregister(self._registered.pop())


def _cudart() -> Any:
    """The CUDA runtime as torch binds it; calls return error codes."""
    return torch.cuda.cudart()


class HostEvent:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Work is done when it is enqueued."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        return (end_event._at - self._at) * 1e3


class HostGraph:
    def __init__(self, body: Body) -> None:
        self.replay = body


class HostDevice:
    """`num_processors` and the memory are what the caller says: policy that depends on them can be tried."""

    def __init__(self, num_processors: int = 4, memory_bytes: int = 1 << 30) -> None:
        self.torch = torch.device("cpu")
        self.num_processors = num_processors
        self._memory_bytes = memory_bytes
        self.registered: list[int] = []
        """Sizes of the ranges registered now."""

    def activate(self) -> None:
        """Every thread is on the host."""

    def record(self) -> Event:
        return HostEvent()

    def upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array.copy())

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def capture(self, body: Body) -> Graph:
        return HostGraph(body)

    def register(self, memory: memoryview) -> None:
        self.registered.append(memory.nbytes)

    def free_bytes(self) -> int:
        return self._memory_bytes

    def peak_bytes(self, body: Body) -> int:
        body()
        return 0

    def synchronize(self) -> None:
        """Nothing is pending."""

    def close(self) -> None:
        self.registered.clear()
