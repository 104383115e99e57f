"""`CudaDevice` as far as it goes without a GPU: torch.cuda is played by a double that keeps the allocator's rules."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipring.kernels.tiles import current_architecture
from slipring.workers.cuda.device import CudaDevice
from slipring.workers.link import StartRefused


class Cuda:
    """A pool lives as long as a graph of it does, and cannot be taken up again afterwards (torch asserts it)."""

    def __init__(self) -> None:
        self.pools: dict[object, int] = {}
        self.capturing = False
        self.capability: tuple[int, int] = (9, 0)
        self.free = 1000
        self.unregistered: list[int] = []

    def graph(self) -> Any:
        cuda = self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                if cuda.pools.get(pool) == 0:
                    raise RuntimeError("INTERNAL ASSERT FAILED: it->second->use_count > 0")
                cuda.pools[pool] = cuda.pools.get(pool, 0) + 1
                cuda.capturing, self.pool = True, pool

            def capture_end(self) -> None:
                cuda.capturing = False

            def __del__(self) -> None:
                cuda.pools[self.pool] -= 1

        return Graph()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    double = Cuda()
    runtime = types.SimpleNamespace(cudaHostUnregister=double.unregistered.append)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device": lambda device: None,
        "get_device_capability": lambda: double.capability,
        "get_device_properties": lambda device: types.SimpleNamespace(multi_processor_count=132),
        "Stream": lambda device: "stream",
        "graph_pool_handle": lambda: (1, 0),
        "CUDAGraph": double.graph,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (double.free, 2000),
        "cudart": lambda: runtime,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda size, device: torch.ones(size))
    current_architecture.cache_clear()
    yield double
    current_architecture.cache_clear()


def test_a_device_that_is_not_there_is_refused(cuda: Cuda) -> None:
    with pytest.raises(StartRefused, match=r"cuda:2: torch finds 2 CUDA devices, the last one is cuda:1"):
        CudaDevice("cuda:2")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_a_device_without_kernels_is_refused(cuda: Cuda, capability: tuple[int, int]) -> None:
    cuda.capability = capability
    with pytest.raises(StartRefused, match=f"is sm_{capability[0]}0; the kernels are made for sm_90, sm_100"):
        CudaDevice("cuda:1")


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_hopper_and_blackwell_are_taken(cuda: Cuda, capability: tuple[int, int]) -> None:
    cuda.capability = capability
    assert CudaDevice("cuda:1").num_processors == 132


def test_an_interrupted_first_capture_spoils_no_later_one(cuda: Cuda) -> None:
    device = CudaDevice("cuda:0")

    def interrupted() -> None:
        assert cuda.capturing
        raise InterruptedError

    for _ in range(2):
        with pytest.raises(InterruptedError):
            device.capture(interrupted)
        assert not cuda.capturing
    kept = [device.capture(_nothing), device.capture(_nothing)]
    assert cuda.pools == {(1, 0): 1 + len(kept)}


def _nothing() -> None:
    pass


def test_a_peak_is_what_the_driver_has_less_of(cuda: Cuda) -> None:
    """Reserved segments and loaded code included, of which torch's own count of live tensors knows nothing."""
    device = CudaDevice("cuda:0")

    def body() -> None:
        cuda.free -= 300

    assert device.peak_bytes(body) == 300
    assert device.peak_bytes(lambda: None) == 0


def test_memory_is_unregistered_though_the_device_has_failed(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice("cuda:0")
    device._registered = [4096, 8192]

    def failed(device: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    with pytest.raises(RuntimeError, match="illegal"):
        device.close()
    assert cuda.unregistered == [8192, 4096]
