"""`y = x W^T (+ bias) (+ residual)`, with the weight packed once at load.

On the CPU the packed form is oneDNN's own blocked layout: at one to 64 rows it is about twice as fast as
`F.linear` on a row-major weight (SmolLM2, two Zen 4 cores: 17 ms against 35 ms for all products of one token in
fp32, 75 against 125 ms for 64). A packed weight can only be used through `linear`. Where oneDNN cannot run a dtype
the weight stays row-major and `linear` uses the reference.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

_POINTWISE = torch.ops.mkldnn._linear_pointwise
_NO_POST_OP: list[float] = []


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [T, in], row-major weight [out, in], bias [out], residual [T, out] -> [T, out], all of one dtype."""
    y = F.linear(x, weight, bias)
    return y if residual is None else y.add_(residual)


def pack_weight(weight: Tensor) -> Tensor:
    """[out, in] row-major -> the form that `linear` is fastest with on this device. The argument may be freed."""
    if not weight.is_cuda and _onednn_runs(weight.dtype):
        return torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return weight


def packed_parts(weight: Tensor) -> tuple[int, int, bytes] | None:
    """(address, bytes, oneDNN's description of its layout) of a packed weight, for `packed_weight` in any process on
    this machine; None where this torch cannot tell."""
    if _library() is None:
        return None
    layout = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(weight).tolist())
    return torch.ops.mkldnn.data_ptr(weight), torch.ops.mkldnn._nbytes(weight), layout


def packed_weight(address: int, layout: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A packed weight over memory that somebody else owns: 64-byte aligned, unchanged for as long as it is used."""
    library = _library()
    assert library is not None
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    strides = (ctypes.c_int64 * len(shape))(*torch.empty(shape, device="meta").stride())
    handle = ctypes.c_void_p()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(len(shape)),
        sizes,
        strides,
        ctypes.c_int64(0),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        ctypes.create_string_buffer(layout, len(layout)),
        ctypes.c_int64(len(layout)),
    )
    if failed:
        raise RuntimeError("torch could not make a packed weight over shared memory")
    steal = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr  # pyright: ignore[reportAttributeAccessIssue]
    return steal(_capsule(handle))


@functools.cache
def _library() -> ctypes.CDLL | None:
    """torch's C interface for compiled models: the one way to a packed weight over memory of our own."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        _ = library.aoti_torch_create_tensor_from_blob_v2, library.aoti_torch_layout__mkldnn
        _ = torch._C._aoti, torch.ops.mkldnn._get_mkldnn_serialized_md  # pyright: ignore[reportAttributeAccessIssue]
    except (OSError, AttributeError):
        return None
    return library


def _capsule(handle: ctypes.c_void_p) -> object:
    """A pointer as torch's own bindings take it."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(handle, None, None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """As `linear_ref`, with a weight from `pack_weight`. `residual` must be contiguous and is not changed."""
    if not weight.is_mkldnn:
        return linear_ref(x, weight, bias, residual)
    if residual is None:
        return _POINTWISE(x, weight, bias, "none", _NO_POST_OP, "")
    return _POINTWISE.binary(x, residual, weight, bias, "add")


def _onednn_runs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32
