"""The plugs that map peers, and streams, as far as they go without a GPU: CuPy is played by a double."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest
import torch

from slipring.kernels import streams
from slipring.kernels.peers import CudaPeers, LocalPeers, SharedPeers
from slipring.shm.segment import Segment


class RuntimeDouble:
    """cupy.cuda.runtime for host memory: handles are addresses, as 64 bytes. `calls` is what a GPU would have done."""

    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.memory: dict[int, Any] = {}

    def setDevice(self, device: int) -> None:
        self.calls.append(("setDevice", device))

    def malloc(self, nbytes: int) -> int:
        buffer = ctypes.create_string_buffer(nbytes)
        self.memory[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def memset(self, address: int, value: int, nbytes: int) -> None:
        self.calls.append(("memset", value, nbytes))

    def deviceSynchronize(self) -> None:
        self.calls.append(("deviceSynchronize",))

    def ipcGetMemHandle(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int) -> int:
        if not any(handle):
            raise RuntimeError("cudaErrorInvalidValue")
        self.calls.append(("open", flags))
        return int.from_bytes(handle, "little")

    def ipcCloseMemHandle(self, address: int) -> None:
        self.calls.append(("close", address))

    def free(self, address: int) -> None:
        self.calls.append(("free", address))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> RuntimeDouble:
    double = RuntimeDouble()
    cuda = types.SimpleNamespace(runtime=double, Event=EventDouble, Stream=StreamDouble)
    monkeypatch.setattr(streams, "cupy", lambda: types.SimpleNamespace(cuda=cuda))
    return double


class EventDouble:
    done = True

    def __init__(self, disable_timing: bool) -> None:
        assert disable_timing


class StreamDouble:
    log: list[str]
    ptr = 4711

    def __init__(self, non_blocking: bool, priority: int) -> None:
        self.made, self.log = (non_blocking, priority), []

    def __enter__(self) -> None:
        self.log.append("enter")

    def __exit__(self, *error: object) -> None:
        self.log.append("exit")


def test_shared_buffers_lie_side_by_side() -> None:
    segment = Segment.create("test", 8192)
    ranks = [SharedPeers(rank, 4096, segment.buf) for rank in range(2)]
    handles = [rank.export() for rank in ranks]
    one, two = (rank.connect(handles) for rank in ranks)
    assert one == two and one[1] - one[0] == 4096
    with pytest.raises(ValueError, match="past the segment"):
        ranks[0].connect([handles[0], (8192).to_bytes(8, "little")])
    for rank in ranks:
        rank.close()
    segment.close()


def test_local_buffers_are_zeroed_tensors() -> None:
    ranks = [LocalPeers(rank, 1000, torch.device("cpu")) for rank in range(2)]
    addresses = ranks[0].connect([rank.export() for rank in ranks])
    assert len(set(addresses)) == 2 and not any(address % 16 for address in addresses)
    assert ctypes.string_at(addresses[1], 1000) == bytes(1000)


def test_cuda_buffers_are_opened_once_and_closed_before_they_are_freed(runtime: RuntimeDouble) -> None:
    ranks = [CudaPeers(rank, 4096, device=rank) for rank in range(3)]
    assert runtime.calls[:3] == [("setDevice", 0), ("memset", 0, 4096), ("deviceSynchronize",)], "zeroed before export"
    handles = [rank.export() for rank in ranks]
    runtime.calls.clear()
    addresses = ranks[1].connect(handles)
    assert addresses == tuple(int.from_bytes(handle, "little") for handle in handles)
    assert runtime.calls == [("setDevice", 1), ("open", 1), ("open", 1)], "its own handle cannot be opened"
    runtime.calls.clear()
    ranks[1].close(), ranks[1].close()
    names = [call[0] for call in runtime.calls]
    assert names == ["setDevice", "deviceSynchronize", "close", "close", "free"]
    assert runtime.calls[-1] == ("free", addresses[1])


def test_a_buffer_that_cannot_be_zeroed_is_freed(runtime: RuntimeDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(runtime, "deviceSynchronize", failing)
    with pytest.raises(RuntimeError, match="IllegalAddress"):
        CudaPeers(0, 4096, 0)
    assert runtime.calls[-1] == ("free", *runtime.memory)


def test_a_handle_that_cannot_be_opened_leaves_nothing_mapped(runtime: RuntimeDouble) -> None:
    ranks = [CudaPeers(rank, 4096, device=rank) for rank in range(2)]
    with pytest.raises(RuntimeError, match="InvalidValue"):
        ranks[0].connect([ranks[0].export(), ranks[1].export(), bytes(64)])
    assert [call[0] for call in runtime.calls].count("close") == 1


def test_a_stream_is_current_for_torch_and_cupy(runtime: RuntimeDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    class Current:
        def __init__(self, stream: object) -> None:
            assert stream == ("external", 4711)

        def __enter__(self) -> None:
            entered.append("torch")

        def __exit__(self, *error: object) -> None:
            entered.pop()

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer: ("external", pointer))
    monkeypatch.setattr(torch.cuda, "stream", Current)
    stream = streams.Stream(priority=-1)
    assert stream.raw.made == (True, -1)
    with stream, stream:
        assert entered == ["torch", "torch"] and stream.raw.log == ["enter", "enter"]
    assert not entered and stream.raw.log == ["enter", "enter", "exit", "exit"]
    assert streams.Event().done


def test_without_cupy_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    streams.cupy.cache_clear()
    with pytest.raises(streams.NoCuda, match=r"pip install 'slipring\[cuda\]'"):
        CudaPeers(0, 4096, 0)


def test_without_a_device_the_error_names_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("importlib.import_module", lambda name: module)
    streams.cupy.cache_clear()
    with pytest.raises(streams.NoCuda, match="slipring doctor"):
        streams.Stream()
