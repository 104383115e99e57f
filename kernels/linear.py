"""`y = x W^T (+ bias) (+ residual)`, with the weight packed once at load.

On the CPU the packed form is oneDNN's own blocked layout: at one to 64 rows it is about twice as fast as
`F.linear` on a row-major weight (SmolLM2, two Zen 4 cores: 17 ms against 35 ms for all products of one token in
fp32, 75 against 125 ms for 64). A packed weight can only be used through `linear`. Where oneDNN cannot run a dtype
the weight stays row-major and `linear` uses the reference.
"""

from __future__ import annotations

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
