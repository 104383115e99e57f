"""Writes tiny quantised checkpoints in every supported format, each with the dense weights that it stands for.

The quantisers and the dense weights are written from the formats' definitions and share no code with the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from slipring.runtime.model import resolve_model
from slipring.shm.spec import ModelSpec

GROUP = 64
Quantize = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""W [N, K] -> (stored tensors by their ending, the dense W that they mean)."""

CONFIG = LlamaConfig(
    vocab_size=260, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    attention_bias=True, tie_word_embeddings=False,
)  # fmt: skip


def fp8(per_channel: bool) -> Quantize:
    def quantize(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = w.abs().amax(1, keepdim=True) if per_channel else w.abs().max().view(1)
        scale = (largest / 448).bfloat16()
        codes = (w / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()

    return quantize


def fp8_blocks(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, dense = torch.empty_like(w, dtype=torch.float8_e4m3fn), torch.empty_like(w)
    scale = torch.empty(-(-w.shape[0] // 128), -(-w.shape[1] // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = w[at].abs().max() / 448
            codes[at] = (w[at] / scale[i, j]).to(torch.float8_e4m3fn)
            dense[at] = codes[at].float() * scale[i, j]
    return {"weight": codes, "weight_scale_inv": scale}, dense


def _grid(w: Tensor, bits: int, symmetric: bool, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [K, N], zeros [G, N], scales [G, N] fp16, dense [N, K]); column k of w belongs to group[k]."""
    columns, top = w.T, 2**bits - 1
    num_groups = int(group.max()) + 1
    low, high = (torch.stack([f(columns[group == g]) for g in range(num_groups)]) for f in (_lowest, _highest))
    scales = ((high - low) / top).half()
    zeros = torch.full_like(low, 2 ** (bits - 1)) if symmetric else (-low / scales.float()).round().clamp(1, top)
    if symmetric:
        scales = (torch.maximum(high, -low) / (2 ** (bits - 1) - 1)).half()
    codes = (columns / scales.float()[group] + zeros[group]).round().clamp(0, top)
    return codes, zeros, scales, ((codes - zeros[group]) * scales.float()[group]).T.contiguous()


def _lowest(x: Tensor) -> Tensor:
    return x.amin(0)


def _highest(x: Tensor) -> Tensor:
    return x.amax(0)


def _words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[R, C] -> int32 [R, C * bits / 32]; element order[i] of a word's run is its i-th lowest field."""
    runs = values.long().view(values.shape[0], -1, 32 // bits)
    runs = runs if order is None else runs[..., list(order)]
    words = (runs << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def awq(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, dense = _grid(w, 4, False, torch.arange(w.shape[1]) // GROUP)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": _words(codes, 4, order), "qzeros": _words(zeros, 4, order), "scales": scales}, dense


def gptq(bits: int, symmetric: bool, act_order: bool, version: int) -> Quantize:
    def quantize(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        group = torch.arange(w.shape[1]) // GROUP
        if act_order:
            group = group[torch.randperm(w.shape[1])]
        codes, zeros, scales, dense = _grid(w, bits, symmetric, group)
        qweight = _words(codes.T.contiguous(), bits).T.contiguous()
        qzeros = _words(zeros - 1 if version == 1 else zeros, bits)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": group.int()}, dense

    return quantize


def compressed_tensors(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    inputs = weights | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    shared = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return shared | {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "damp_percent": 0.1, "lm_head": False}
BLOCK_FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "fp8-channel": (compressed_tensors("channel"), fp8(True)),
    "fp8-tensor": (compressed_tensors("tensor"), fp8(False)),
    "fp8-blocks": (BLOCK_FP8, fp8_blocks),
    "awq": (AWQ, awq),
    "gptq-int4": (_GPTQ | {"bits": 4, "sym": True, "desc_act": False}, gptq(4, True, False, 1)),
    "gptq-int4-act-order": (_GPTQ | {"bits": 4, "sym": False, "desc_act": True}, gptq(4, False, True, 1)),
    "gptq-v2-int4": (_GPTQ | {"bits": 4, "sym": False, "checkpoint_format": "gptq_v2"}, gptq(4, False, False, 2)),
    "gptq-int8": (_GPTQ | {"bits": 8, "sym": True, "desc_act": False}, gptq(8, True, False, 1)),
}


def save_quantized(name: str, path: Path) -> tuple[ModelSpec, Any]:
    """Write a tiny Llama in the format; returns our spec of it, and transformers' model with the dense weights."""
    torch.manual_seed(1)
    config, quantize = FORMATS[name]
    model = AutoModelForCausalLM.from_config(CONFIG).float().eval()
    stored: dict[str, Tensor] = {}
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                value.add_(torch.randn_like(value) * 0.2)
            module = key.removesuffix(".weight")
            if not module.endswith("_proj"):
                stored[key] = value.detach().clone()
                continue
            tensors, dense = quantize(value.detach())
            stored |= {f"{module}.{ending}": tensor.contiguous() for ending, tensor in tensors.items()}
            value.copy_(dense)
    model.config.save_pretrained(path)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    file, extra = path / "config.json", {"architectures": ["LlamaForCausalLM"], "quantization_config": config}
    file.write_text(json.dumps(json.loads(file.read_text()) | extra))
    return resolve_model(str(path)), model
