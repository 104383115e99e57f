"""`quantization_config` of a Hugging Face config.json -> `QuantizationSpec`. Owns which quantised models are served.

Which tensors are quantised is not decided here: the loader sees it by the tensors that are there, so the lists of
exempt modules (`ignore`, `modules_to_not_convert`) need no reading. Everything that would change what the stored
numbers mean is checked, and what is not known is refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from slipring.runtime.architectures import ModelError
from slipring.shm.spec import QuantizationSpec

SUPPORTED = (
    "fp8 by compressed-tensors (weight scales per channel or tensor, dynamic activation scales per token), "
    "fp8 in blocks of 128 x 128 (DeepSeek's form), AWQ int4 (gemm) and GPTQ int4 or int8"
)
BLOCK = [128, 128]


class _Arguments(msgspec.Struct, kw_only=True):
    """compressed-tensors' description of how weights or activations are quantised."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    dynamic: bool | str = False
    symmetric: bool = True
    actorder: str | bool | None = None


class _Group(msgspec.Struct, kw_only=True):
    weights: _Arguments | None = None
    input_activations: _Arguments | None = None
    output_activations: _Arguments | None = None


class _CompressedTensors(msgspec.Struct, kw_only=True):
    config_groups: dict[str, _Group] = {}
    format: str | None = None
    sparsity_config: dict[str, Any] | None = None


class _BlockFp8(msgspec.Struct, kw_only=True):
    weight_block_size: list[int] | None = None
    activation_scheme: str = "dynamic"
    fmt: str = "e4m3"
    scale_fmt: str | None = None


class _Awq(msgspec.Struct, kw_only=True):
    bits: int = 4
    group_size: int = 128
    version: str = "gemm"
    zero_point: bool = True


class _Gptq(msgspec.Struct, kw_only=True):
    bits: int
    group_size: int = 128
    checkpoint_format: str = "gptq"
    dynamic: dict[str, Any] | None = None


def quantization_spec(config: dict[str, Any], where: str) -> QuantizationSpec:
    """`where` begins every message. Raises ModelError: of a kind that is not served, or not well formed."""
    method = config.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ModelError(f"{where}: the quantisation {method!r} is not supported. Supported: {SUPPORTED}.")
    try:
        found = reader(config)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: quantization_config: {error}") from None
    if isinstance(found, str):
        raise ModelError(f"{where}: {method} with {found} is not supported. Supported: {SUPPORTED}.")
    return found


def _compressed_tensors(raw: dict[str, Any]) -> QuantizationSpec | str:
    config = msgspec.convert(raw, _CompressedTensors)
    if (sparsity := (config.sparsity_config or {}).get("format", "dense")) != "dense":
        return f"sparsity {sparsity!r}"
    if not config.config_groups:
        return "no config_groups"
    problems = (_group_problem(group) for group in config.config_groups.values())
    return next(filter(None, problems), None) or QuantizationSpec(method="fp8", bits=8)


def _group_problem(group: _Group) -> str | None:
    weights, inputs = group.weights, group.input_activations
    if weights is None or (weights.type, weights.num_bits) != ("float", 8):
        kind = "no quantised weights" if weights is None else f"{weights.type}{weights.num_bits} weights"
        return kind
    if weights.strategy not in ("channel", "tensor") or not weights.symmetric or weights.dynamic:
        return f"weight scales per {weights.strategy}"
    if inputs is None:
        return "activations that are not quantised"
    if (inputs.type, inputs.num_bits, inputs.strategy, inputs.dynamic) != ("float", 8, "token", True):
        scheme = "dynamic" if inputs.dynamic else "static"
        return f"{inputs.type}{inputs.num_bits} activations, {scheme} per {inputs.strategy}"
    return "quantised outputs" if group.output_activations is not None else None


def _block_fp8(raw: dict[str, Any]) -> QuantizationSpec | str:
    config = msgspec.convert(raw, _BlockFp8)
    if config.weight_block_size != BLOCK:
        return f"weight_block_size {config.weight_block_size}"
    if config.activation_scheme != "dynamic" or config.fmt != "e4m3":
        return f"{config.activation_scheme} {config.fmt} activations"
    if config.scale_fmt not in (None, "float"):
        # ue8m0: the activations' scales are powers of two as well, which our kernels do not make.
        return f"scales of the format {config.scale_fmt!r}"
    return QuantizationSpec(method="fp8_block", bits=8, group_size=BLOCK[1])


def _awq(raw: dict[str, Any]) -> QuantizationSpec | str:
    config = msgspec.convert(raw, _Awq)
    if config.bits != 4 or config.version.lower() != "gemm" or not config.zero_point:
        return f"{config.bits} bits, version {config.version!r}, zero_point {str(config.zero_point).lower()}"
    return QuantizationSpec(method="awq", bits=4, group_size=config.group_size)


def _gptq(raw: dict[str, Any]) -> QuantizationSpec | str:
    config = msgspec.convert(raw, _Gptq)
    if config.bits not in (4, 8):
        return f"{config.bits} bits"
    if config.checkpoint_format not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {config.checkpoint_format!r}"
    if config.dynamic:
        return "rules of its own for some modules (`dynamic`)"
    less_one = config.checkpoint_format == "gptq"
    return QuantizationSpec(method="gptq", bits=config.bits, group_size=config.group_size, zeros_less_one=less_one)


_READERS = {"compressed-tensors": _compressed_tensors, "fp8": _block_fp8, "awq": _awq, "gptq": _gptq}
