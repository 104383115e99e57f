"""Weights of one model: maps the files that a `ModelSpec` names and hands out tensors in the compute dtype.

Owns the mappings; a tensor is read, decoded and converted when it is asked for, straight into its place in a fused
weight, and a fused weight goes to the device as a whole. Quantised linear layers of safetensors checkpoints
(`quantized.py`) are dequantised the same way, unless the device has kernels for them (`quantized`). Names are
Hugging Face's whatever the file calls them. A tensor that is missing, cut off or of the wrong size raises
`WeightError`, which names the tensor and the file.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipring.kernels.linear import pack_weight
from slipring.shm.spec import ModelSpec, TensorSpec
from slipring.workers.dequantize import dequantize_into, row_bytes
from slipring.workers.gguf_names import canonical_name, permuted_heads
from slipring.workers.link import StartRefused
from slipring.workers.quantized import MARKS, Part, QuantizedLinear, dequantize_part, read_part
from slipring.workers.weight_share import WeightShare

ProgressFn = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in all)."""


STORED = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8,
}  # fmt: skip
"""safetensors' names of the dtypes that quantised checkpoints hold."""


class WeightError(StartRefused):
    """A checkpoint that cannot be loaded; the message names the tensor and the file."""


class Weights:
    """The tensors of one checkpoint. `close()` drops the mappings; tensors that were handed out are copies.

    `device` is where they are handed out. `keep_quantized`: whether `quantized` answers; None: as the device is best
    served, which is yes for a GPU that computes in 16 bits (no kernel multiplies quantised weights in fp32).
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        progress: ProgressFn | None = None,
        device: str | torch.device = "cpu",
        keep_quantized: bool | None = None,
        share: WeightShare | None = None,
    ) -> None:
        self.spec = spec
        self._share = share
        self.dtype = dtype
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda" and dtype.itemsize == 2
        self._keeps_quantized = on_gpu if keep_quantized is None else keep_quantized
        self._progress = progress
        self._done = 0
        self._total = sum(tensor.nbytes for tensor in spec.tensors)
        rename = canonical_name if spec.format == "gguf" else str
        self._index = {rename(tensor.name): tensor for tensor in spec.tensors}
        self._files: dict[int, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, contiguous, in the compute dtype, on the device. Raises WeightError."""
        return self.fused((name,), shape)

    def fused(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """Tensors of equal width stacked by rows into one of `shape`, dequantised if need be. Raises WeightError."""
        return self._kept(" ".join(names), lambda: self._fused(names, shape))

    def packed(self, names: Sequence[str], shape: tuple[int, ...], made: Tensor | None = None) -> Tensor:
        """As `fused`, in the form that `kernels.linear` wants; `made`: the same tensor, if it is there already."""
        return self._kept(
            " ".join(["packed", *names]), lambda: pack_weight(self._fused(names, shape) if made is None else made)
        )

    def _kept(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        return make() if self._share is None else self._share.tensor(key, make)

    def _fused(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype)
        row = 0
        for name in names:
            part, tensor = self._part(name), self._find(name)
            size = tensor.shape if part is None else part.shape
            if size[1:] != shape[1:] or row + size[0] > shape[0]:
                raise WeightError(f"{self._where(tensor)}: shape {size} does not fit into {shape} at row {row}")
            into = out[row : row + size[0]]
            if part is None:
                self._read(name, tensor, into)
            else:
                dequantize_part(part, into)
            row += size[0]
        if row != shape[0]:
            raise WeightError(f"{self._where(self._find(names[0]))}: {row} rows where the model has {shape[0]}")
        return out.to(self.device)

    def quantized(self, names: Sequence[str], shape: tuple[int, int]) -> QuantizedLinear | None:
        """As `fused`, kept quantised; None when it is to be dequantised, or is not quantised in all its parts."""
        if not self._keeps_quantized or not all(self._is_quantized(name) for name in names):
            return None
        parts = [part for name in names if (part := self._part(name)) is not None]
        linear = QuantizedLinear(parts, self.device)
        if linear.shape != shape or any(part.shape[1] != shape[1] for part in parts):
            found = [part.shape for part in parts]
            raise WeightError(f"{self._where(self._find(names[0]))}: shapes {found} do not stack to {shape}")
        return linear

    def stored(self, name: str) -> Tensor:
        """One tensor as the file has it: own shape and dtype, on the CPU. Raises WeightError."""
        tensor = self._find(name)
        if (dtype := STORED.get(tensor.dtype)) is None:
            raise WeightError(f"{self._where(tensor)}: unexpected dtype {tensor.dtype}")
        expected = math.prod(tensor.shape) * dtype.itemsize
        raw = self._checked(tensor, expected).clone()  # a copy is aligned, and outlives the mapping
        self._count(tensor)
        return raw.view(dtype).view(tensor.shape)

    def close(self) -> None:
        """The model is built."""
        self._files.clear()
        if self._share is not None:
            self._share.finish()
            if self._progress is not None:
                self._progress(self._total, self._total)

    def _is_quantized(self, name: str) -> bool:
        module, quantization = name.removesuffix(".weight"), self.spec.quantization
        return quantization is not None and module != name and f"{module}.{MARKS[quantization.method]}" in self._index

    def _part(self, name: str) -> Part | None:
        if self.spec.quantization is None or not self._is_quantized(name):
            return None
        try:
            return read_part(self.spec.quantization, name.removesuffix(".weight"), self.stored, self.__contains__)
        except ValueError as error:
            raise WeightError(f"{self._where(self._find(name))}: {error}") from None

    def _find(self, name: str) -> TensorSpec:
        if (tensor := self._index.get(name)) is None and self._is_quantized(name):
            # AWQ and GPTQ call it by another name.
            tensor = self._index.get(f"{name.removesuffix('weight')}qweight")
        if tensor is None:
            raise WeightError(f"tensor {name} is missing from {self.spec.path}")
        return tensor

    def _where(self, tensor: TensorSpec) -> str:
        return f"tensor {tensor.name} in {self.spec.files[tensor.file]}"

    def _read(self, name: str, tensor: TensorSpec, out: Tensor) -> None:
        rows, cols = (out.shape[0], out[0].numel()) if out.dim() > 1 else (1, out.numel())
        raw = self._bytes(tensor, rows, cols)
        if self.spec.format == "gguf":
            raw = self._unpermute(name, raw, out)
        try:
            dequantize_into(raw, tensor.dtype, out.view(rows, cols))
        except (NotImplementedError, KeyError):
            raise WeightError(f"{self._where(tensor)}: dtype {tensor.dtype} cannot be read as weights") from None
        self._count(tensor)

    def _count(self, tensor: TensorSpec) -> None:
        self._done += tensor.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _bytes(self, tensor: TensorSpec, rows: int, cols: int) -> Tensor:
        """The stored bytes, [rows, bytes of a row], checked against the file's size and the tensor's shape."""
        try:
            expected = rows * row_bytes(tensor.dtype, cols)
        except ValueError as error:
            raise WeightError(f"{self._where(tensor)}: {error}") from None
        return self._checked(tensor, expected).view(rows, -1)

    def _checked(self, tensor: TensorSpec, expected: int) -> Tensor:
        if tensor.nbytes != expected:
            shape = "x".join(map(str, tensor.shape))
            raise WeightError(
                f"{self._where(tensor)}: {tensor.nbytes} bytes, but {tensor.dtype} {shape} takes {expected}"
            )
        file = self._map(tensor)
        if tensor.offset + tensor.nbytes > file.numel():
            end = tensor.offset + tensor.nbytes
            raise WeightError(f"{self._where(tensor)}: ends at byte {end}, the file has {file.numel()}; is it cut off?")
        return file[tensor.offset : tensor.offset + tensor.nbytes]

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
