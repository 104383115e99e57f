"""Stored tensors to floats: safetensors' dtypes and every GGML block type.

The common types have vectorised torch versions, which run over pieces that stay in the cache and are about 15 times
faster than the `gguf` package's; all others go through `gguf.quants.dequantize`, which is also the tests' oracle.
GGML's blocks lie along a row, so rows can be selected and permuted before they are decoded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PIECE_ELEMENTS = 1 << 19
"""Elements decoded at once: 2 MiB of fp32, within the second-level caches of two cores."""


def row_bytes(dtype: str, num_columns: int) -> int:
    """Bytes of one stored row. Raises ValueError for an unknown dtype or a width that is not whole blocks."""
    if dtype in _PLAIN:
        return num_columns * _PLAIN[dtype].itemsize
    block, nbytes = _block_of(dtype)
    if num_columns % block:
        raise ValueError(f"{num_columns} columns are not whole {dtype} blocks of {block}")
    return num_columns // block * nbytes


def dequantize_into(raw: Tensor, dtype: str, out: Tensor) -> None:
    """raw uint8 [rows, row_bytes(dtype, cols)] -> out [rows, cols], any float dtype, contiguous rows."""
    if dtype in _PLAIN:
        out.copy_(_aligned(raw).view(_PLAIN[dtype]))
        return
    rows, cols = out.shape
    block, nbytes = _block_of(dtype)
    decode = _FAST.get(dtype) or _through_gguf(dtype)
    step = max(1, _PIECE_ELEMENTS // cols)
    for begin in range(0, rows, step):
        piece = out[begin : begin + step]
        blocks = raw[begin : begin + step].reshape(-1, nbytes)
        if piece.dtype == torch.float32 and piece.is_contiguous():
            decode(blocks, piece.view(-1, block))
        else:
            wide = torch.empty((blocks.shape[0], block))
            decode(blocks, wide)
            piece.copy_(wide.view(piece.shape))


def _aligned(raw: Tensor) -> Tensor:
    """safetensors promises no alignment of its data; torch reinterprets aligned bytes only."""
    return raw.clone() if raw.storage_offset() % 4 else raw


def _halves(blocks: Tensor, begin: int, count: int) -> Tensor:
    """`count` float16 values that start at byte `begin` of each block, as float32 [n, count]."""
    return blocks[:, begin : begin + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """packed [n, 16] -> out [n, 2, 16]: the low nibbles, then the high ones."""
    out[:, 0] = packed & 15
    out[:, 1] = packed >> 4


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """Block of 32: f16 scale, 16 bytes of nibbles; value = (q - 8) * scale."""
    _nibbles(blocks[:, 2:], out.view(-1, 2, 16))
    out.sub_(8).mul_(_halves(blocks, 0, 1))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """Block of 32: f16 scale, f16 minimum, 16 bytes of nibbles; value = q * scale + minimum."""
    scale, minimum = _halves(blocks, 0, 2).split(1, dim=1)
    _nibbles(blocks[:, 4:], out.view(-1, 2, 16))
    out.mul_(scale).add_(minimum)


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """Block of 32: f16 scale, 32 signed bytes; value = q * scale."""
    torch.mul(blocks[:, 2:].view(torch.int8), _halves(blocks, 0, 1), out=out)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of Q4_K and Q5_K -> 8 scales and 8 minimums of 6 bits each, float32 [n, 8, 1]."""
    low, mid, high = packed.split(4, dim=1)
    scale = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1)
    minimum = torch.cat((mid & 63, (high >> 4) | ((mid >> 2) & 48)), 1)
    return scale.float().unsqueeze(-1), minimum.float().unsqueeze(-1)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """Block of 256: f16 scale, f16 minimum, 12 bytes of sub-scales, 128 bytes of nibbles in runs of 32."""
    d, dmin = _halves(blocks, 0, 2).split(1, dim=1)
    scale, minimum = _k_scales(blocks[:, 4:16])
    packed = blocks[:, 16:].view(-1, 4, 32)
    runs = out.view(-1, 4, 2, 32)
    runs[:, :, 0] = packed & 15
    runs[:, :, 1] = packed >> 4
    out.view(-1, 8, 32).mul_(scale * d.unsqueeze(-1)).sub_(minimum * dmin.unsqueeze(-1))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """Block of 256: 128 bytes of low nibbles, 64 of high bit pairs, 16 signed sub-scales, f16 scale."""
    low = blocks[:, :128].view(-1, 2, 64)
    high = blocks[:, 128:192].view(-1, 2, 32)
    quarters = out.view(-1, 2, 4, 32)
    for quarter in range(4):
        nibble = low[:, :, 32 * (quarter % 2) : 32 * (quarter % 2) + 32] >> (4 * (quarter // 2)) & 15
        quarters[:, :, quarter] = nibble | (((high >> (2 * quarter)) & 3) << 4)
    scale = blocks[:, 192:208].view(torch.int8).float().mul_(_halves(blocks, 208, 1))
    out.sub_(32).view(-1, 16, 16).mul_(scale.unsqueeze(-1))


_FAST: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
_FAST_BLOCKS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}


def _block_of(dtype: str) -> tuple[int, int]:
    """(elements, bytes) of one block."""
    if dtype in _FAST_BLOCKS:
        return _FAST_BLOCKS[dtype]
    # Imported only for the rare types: the package costs a third of a second at start.
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        return GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    except KeyError:
        raise ValueError(f"unknown tensor dtype {dtype!r}") from None


def _through_gguf(dtype: str) -> Callable[[Tensor, Tensor], None]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[dtype]

    def decode(blocks: Tensor, out: Tensor) -> None:
        out.copy_(torch.from_numpy(dequantize(blocks.numpy(), kind)).view(out.shape))

    return decode
