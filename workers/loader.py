"""Weights of one model: maps the files that a `ModelSpec` names and hands out tensors in the compute dtype.

Owns the mappings; a tensor is read, decoded and converted when it is asked for, straight into its place in a fused
weight. Names are Hugging Face's whatever the file calls them. A tensor that is missing, cut off or of the wrong
size raises `WeightError`, which names the tensor and the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipring.shm.spec import ModelSpec, TensorSpec
from slipring.workers.dequantize import dequantize_into, row_bytes
from slipring.workers.gguf_names import canonical_name, permuted_heads

ProgressFn = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


class WeightError(Exception):
    """A checkpoint that cannot be loaded; the message names the tensor and the file."""


class Weights:
    """The tensors of one checkpoint. `close()` drops the mappings; tensors that were handed out are copies."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, progress: ProgressFn | None = None) -> None:
        self.spec = spec
        self.dtype = dtype
        self._progress = progress
        self._done = 0
        self._total = sum(tensor.nbytes for tensor in spec.tensors)
        rename = canonical_name if spec.format == "gguf" else str
        self._index = {rename(tensor.name): tensor for tensor in spec.tensors}
        self._files: dict[int, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, contiguous, in the compute dtype. Raises WeightError."""
        return self.fused((name,), shape)

    def fused(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """Tensors of equal width stacked by rows into one of `shape`. Raises WeightError."""
        out = torch.empty(shape, dtype=self.dtype)
        row = 0
        for name in names:
            tensor = self._find(name)
            if tensor.shape[1:] != shape[1:] or row + tensor.shape[0] > shape[0]:
                raise WeightError(f"{self._where(tensor)}: shape {tensor.shape} does not fit into {shape} at row {row}")
            self._read(name, tensor, out[row : row + tensor.shape[0]])
            row += tensor.shape[0]
        if row != shape[0]:
            raise WeightError(f"{self._where(self._find(names[0]))}: {row} rows where the model has {shape[0]}")
        return out

    def close(self) -> None:
        self._files.clear()

    def _find(self, name: str) -> TensorSpec:
        try:
            return self._index[name]
        except KeyError:
            raise WeightError(f"tensor {name} is missing from {self.spec.path}") from None

    def _where(self, tensor: TensorSpec) -> str:
        return f"tensor {tensor.name} in {self.spec.files[tensor.file]}"

    def _read(self, name: str, tensor: TensorSpec, out: Tensor) -> None:
        rows, cols = (out.shape[0], out[0].numel()) if out.dim() > 1 else (1, out.numel())
        raw = self._bytes(tensor, rows, cols)
        if self.spec.format == "gguf":
            raw = self._unpermute(name, raw, out)
        dequantize_into(raw, tensor.dtype, out.view(rows, cols))
        self._done += tensor.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _bytes(self, tensor: TensorSpec, rows: int, cols: int) -> Tensor:
        """The stored bytes, [rows, bytes of a row], checked against the file's size and the tensor's shape."""
        try:
            expected = rows * row_bytes(tensor.dtype, cols)
        except ValueError as error:
            raise WeightError(f"{self._where(tensor)}: {error}") from None
        if tensor.nbytes != expected:
            shape = "x".join(map(str, tensor.shape))
            raise WeightError(
                f"{self._where(tensor)}: {tensor.nbytes} bytes, but {tensor.dtype} {shape} takes {expected}"
            )
        file = self._map(tensor)
        if tensor.offset + tensor.nbytes > file.numel():
            end = tensor.offset + tensor.nbytes
            raise WeightError(f"{self._where(tensor)}: ends at byte {end}, the file has {file.numel()}; is it cut off?")
        return file[tensor.offset : tensor.offset + tensor.nbytes].view(rows, -1)

    def _map(self, tensor: TensorSpec) -> Tensor:
        if (mapped := self._files.get(tensor.file)) is not None:
            return mapped
        path = self.spec.files[tensor.file]
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                # A private mapping: torch wants writable memory, and nothing is ever written.
                mapping = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
        except (OSError, ValueError) as error:
            raise WeightError(f"{self._where(tensor)}: cannot map the file: {error}") from None
        self._files[tensor.file] = mapped = torch.frombuffer(mapping, dtype=torch.uint8)
        return mapped

    def _unpermute(self, name: str, raw: Tensor, out: Tensor) -> Tensor:
        """Undo llama.cpp's row order of q and k: pairs (2i, 2i+1) of a head back to (i, i + D/2)."""
        spec = self.spec
        heads = permuted_heads(name, spec.architecture, spec.num_heads, spec.num_kv_heads)
        if heads is None:
            return raw
        rows = out.shape[0]
        stored = raw.view(heads, rows // heads // 2, 2, -1)
        return stored.transpose(1, 2).reshape(raw.shape)
