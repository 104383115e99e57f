"""`WeightShare`: where a worker's weights come from when it is not the first one.

`tensor(key, make)` returns the tensor of that name: mapped from the shared segment if it is complete, else made,
written there and mapped, so that the filler holds no copy of its own either. Packed weights (`kernels/linear.py`) are
kept packed. What is handed out is read-only memory, and lives as long as the process.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from slipring.kernels.linear import packed_parts, packed_weight
from slipring.shm.weights import Kept, WeightFile

_RETRY_S = 0.02


class WeightShare:
    def __init__(self, fd: int, wait: Callable[[], None]) -> None:
        """Waits while another worker fills the segment; `wait` is called again and again meanwhile, and may raise."""
        self._file = WeightFile(fd)
        self._index: dict[str, Kept] | None = None
        """None: this worker fills."""
        while not self._file.is_complete:
            if self._file.try_lock():
                break
            wait()
            time.sleep(_RETRY_S)
        if self._file.is_complete:
            self._file.unlock()
            self._index = self._file.index()
        else:
            self._file.begin()

    @property
    def is_filled(self) -> bool:
        return self._index is not None

    def tensor(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of `key`; `make` is called when the segment does not hold it."""
        if self._index is not None:
            kept = self._index.get(key)
            return make() if kept is None else self._mapped(kept)
        tensor = make()
        kept = self._keep(key, tensor)
        return tensor if kept is None else self._mapped(kept)

    def finish(self) -> None:
        """The model is built. Idempotent."""
        if self._index is None:
            self._file.finish()
            self._index = self._file.index()

    def _keep(self, key: str, tensor: Tensor) -> Kept | None:
        """None: it cannot be shared."""
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if tensor.is_mkldnn:
            if (parts := packed_parts(tensor)) is None:
                return None
            address, nbytes, layout = parts
            return self._file.append(key, _memory(address, nbytes), dtype, shape, layout)
        tensor = tensor.contiguous()
        return self._file.append(key, _memory(tensor.data_ptr(), tensor.nbytes), dtype, shape)

    def _mapped(self, kept: Kept) -> Tensor:
        dtype = getattr(torch, kept.dtype)
        mapping = self._file.map(kept)
        flat = torch.frombuffer(mapping, dtype=torch.uint8, count=kept.nbytes)
        if not kept.layout:
            return flat.view(dtype)[: math.prod(kept.shape)].view(kept.shape)
        return packed_weight(flat.data_ptr(), kept.layout, kept.shape, dtype)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
