"""How one rank's buffer becomes addressable by its peers: a plug with three forms.

| form          | memory                     | handle          | for                                             |
|---------------|----------------------------|-----------------|-------------------------------------------------|
| `SharedPeers` | a mapped shared segment    | offset          | real processes under Triton's interpreter       |
| `LocalPeers`  | torch, this process        | address         | ranks as streams of one process                 |
| `CudaPeers`   | cudaMalloc through CuPy    | 64-byte IPC one | one process a GPU                               |

The order is `export`, exchange (workers do it through `shm/ipc.py`), `connect`, use, `disconnect`, exchange again,
`close`: memory must not be freed while a peer has it mapped (CUDA leaves that undefined).

CUDA IPC wants the beginning of a cudaMalloc allocation and no part of torch's pool: handles of a pool's block would
map the whole block, and expandable segments have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from slipring.kernels.streams import cuda_runtime


class PeerBuffers(Protocol):
    """One rank's buffer of `nbytes` zeroed bytes on `device`, and the peers' as this process addresses them."""

    rank: int
    nbytes: int
    device: torch.device

    def export(self) -> bytes:
        """What the others need to map this buffer."""
        ...

    def connect(self, handles: Sequence[bytes]) -> tuple[int, ...]:
        """Map every rank's buffer, handles by rank. Returns addresses by rank, the own one among them."""
        ...

    def disconnect(self) -> None:
        """Unmap the peers' buffers; nothing on the device may use them any more. Idempotent."""
        ...

    def close(self) -> None:
        """Free the own buffer, once every living peer has disconnected. Idempotent."""
        ...


def settle(device: torch.device) -> None:
    """Wait for what was just enqueued to fill a buffer: whoever uses it next may do so on another stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class SharedPeers:
    """All ranks' buffers lie in one segment that every process maps where it likes: rank r's at r * nbytes.

    The segment belongs to the caller and must outlive this object.
    """

    def __init__(self, rank: int, nbytes: int, segment: memoryview) -> None:
        self.rank, self.nbytes, self.device = rank, nbytes, torch.device("cpu")
        self._bytes: np.ndarray | None = np.frombuffer(segment, np.uint8)

    def export(self) -> bytes:
        return (self.rank * self.nbytes).to_bytes(8, "little")

    def connect(self, handles: Sequence[bytes]) -> tuple[int, ...]:
        """Raises ValueError for a handle that points past the segment."""
        assert self._bytes is not None, "connect after disconnect"
        offsets = [int.from_bytes(handle, "little") for handle in handles]
        if any(offset + self.nbytes > self._bytes.nbytes for offset in offsets):
            raise ValueError("a handle points past the segment")
        return tuple(self._bytes.ctypes.data + offset for offset in offsets)

    def disconnect(self) -> None:
        self._bytes = None

    def close(self) -> None:
        self.disconnect()


class LocalPeers:
    """Ranks that are streams of one process see each other's tensors as they are."""

    def __init__(self, rank: int, nbytes: int, device: torch.device) -> None:
        self.rank, self.nbytes, self.device = rank, nbytes, device
        # int64, so that the flags are aligned whatever the allocator does.
        self._own: torch.Tensor | None = torch.zeros(-(-nbytes // 8), dtype=torch.int64, device=device)
        settle(device)

    def export(self) -> bytes:
        assert self._own is not None, "export after close"
        return self._own.data_ptr().to_bytes(8, "little")

    def connect(self, handles: Sequence[bytes]) -> tuple[int, ...]:
        return tuple(int.from_bytes(handle, "little") for handle in handles)

    def disconnect(self) -> None:
        """Nothing is mapped."""

    def close(self) -> None:
        self._own = None


class CudaPeers:
    """A cudaMalloc buffer on `device`, mapped into the other ranks' processes by CUDA IPC."""

    def __init__(self, rank: int, nbytes: int, device: int) -> None:
        """Raises streams.NoCuda; CUDARuntimeError when the device has no room."""
        self.rank, self.nbytes, self.device = rank, nbytes, torch.device("cuda", device)
        self._runtime: Any = cuda_runtime()
        self._mapped: list[int] = []
        self._runtime.setDevice(device)
        self._own: int = self._runtime.malloc(nbytes)
        try:
            self._runtime.memset(self._own, 0, nbytes)
            # The memset is asynchronous, and a peer may signal as soon as it has the handle.
            self._runtime.deviceSynchronize()
        except Exception:
            self._runtime.free(self._own)
            raise

    def export(self) -> bytes:
        return self._runtime.ipcGetMemHandle(self._own)

    def connect(self, handles: Sequence[bytes]) -> tuple[int, ...]:
        """Raises CUDARuntimeError where a peer's GPU cannot be reached from this one; nothing stays mapped then."""
        self._runtime.setDevice(self.device.index)
        try:
            return tuple(self._open(rank, handle) for rank, handle in enumerate(handles))
        except Exception:
            self.disconnect()
            raise

    def _open(self, rank: int, handle: bytes) -> int:
        if rank == self.rank:  # a process cannot open its own handle
            return self._own
        address = self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess)
        self._mapped.append(address)
        return address

    def disconnect(self) -> None:
        if self._mapped:
            self._runtime.setDevice(self.device.index)  # what is waited for is the current device
            self._runtime.deviceSynchronize()
        while self._mapped:
            self._runtime.ipcCloseMemHandle(self._mapped.pop())

    def close(self) -> None:
        self.disconnect()
        if self._own:
            self._runtime.free(self._own)
            self._own = 0
