"""EAGLE heads as their authors publish them (yuhuili/EAGLE-* and EAGLE3-*, also in vLLM's naming), read as they are.

EAGLE and EAGLE-2: `fc` over embedding and hidden state, one layer `layers.0` without a norm of its input (if there is
one, it is used), nothing behind it, and the target's output matrix over the whole vocabulary.

EAGLE-3: `fc` over the target's residual stream at three depths, `midlayer` (or `layers.0`) whose attention reads the
embedding and the feature side by side, `norm` and `lm_head` over a vocabulary of its own; `d2t` says how far above
its number in that vocabulary a token's id is.

`embed_tokens` is the target's, and is taken from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from slipring.kernels.rope import build_cos_sin, inverse_frequencies
from slipring.shm.spec import ModelSpec
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.tensor_files import (
    CONFIG,
    WEIGHTS,
    check_shape,
    check_taps,
    check_tokens,
    first_file,
    read_tensors,
)

FILES = (WEIGHTS, "pytorch_model.bin")
"""The first of them that is there is read."""
_THETA, _EPS = 10_000.0, 1e-6
"""What Hugging Face's LlamaConfig says when a config does not."""
NOT_READ = ("embed_tokens.weight", "t2d")
_LAYERS = ("midlayer", "layers.0")
_QUERIES = ("qkv.codes", *(f"{layer}.self_attn.q_proj.weight" for layer in _LAYERS))


class _AuxLayers(msgspec.Struct, frozen=True):
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None


class PublishedConfig(msgspec.Struct, frozen=True):
    """What counts of a published head's `config.json`."""

    rms_norm_eps: float = _EPS
    rope_theta: float = _THETA
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    eagle_config: _AuxLayers = _AuxLayers()
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None


def is_eagle3(shapes: Mapping[str, Sequence[int]], hidden_size: int) -> bool:
    """By the shapes of a head's tensors, in our own layout too: its attention reads two vectors side by side."""
    return any(shapes[name][-1] == 2 * hidden_size for name in _QUERIES if name in shapes)


def load_published(path: Path, spec: ModelSpec, max_model_len: int) -> EagleHead:
    """In float32. EAGLE's comes without `output`. Raises OSError, or ValueError that says what does not fit."""
    config = msgspec.json.decode((path / CONFIG).read_bytes(), type=PublishedConfig)
    if config.hidden_act != "silu":
        raise ValueError(f"{path}: hidden_act {config.hidden_act!r} is not supported (silu is)")
    tensors = _Tensors(path, _read(path))
    layer = next((name for name in _LAYERS if tensors.has(f"{name}.self_attn.q_proj.weight")), _LAYERS[-1])
    taps = _taps(path, config, spec) if is_eagle3(tensors.shapes, spec.hidden_size) else ()
    head_spec = msgspec.structs.replace(spec, rms_norm_eps=config.rms_norm_eps)
    weights = _layer(tensors, layer, spec, 2 if taps else 1)
    weights |= _around(tensors, layer, spec, taps)
    token_ids = _vocabulary(path, tensors, spec, weights)
    tensors.finish()
    inv_freq, factor = inverse_frequencies(
        spec.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings, max_model_len
    )
    cos_sin = build_cos_sin(inv_freq, factor, max_model_len, torch.float32)
    return EagleHead(head_spec, weights, token_ids, taps, cos_sin=cos_sin)


def _read(path: Path) -> dict[str, Tensor]:
    tensors = read_tensors(first_file(path, FILES))
    return {name: tensor for name, tensor in tensors.items() if name not in NOT_READ}


class _Tensors:
    """Hands out each tensor once, and names what is missing, wrong or left."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self._path, self._tensors = path, tensors

    def has(self, name: str) -> bool:
        return name in self._tensors

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def rows(self, name: str) -> int:
        return len(self._tensors[name])

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._tensors:
            raise ValueError(f"{self._path}: {name} is missing: is this an EAGLE head?")
        tensor = self._tensors.pop(name)
        check_shape(self._path, name, tensor, shape)
        return tensor if tensor.dtype == torch.int64 else tensor.float()

    def maybe(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if self.has(name) else None

    def finish(self) -> None:
        if self._tensors:
            raise ValueError(f"{self._path}: {', '.join(sorted(self._tensors)[:4])}: not part of an EAGLE head we know")


def _taps(path: Path, config: PublishedConfig, spec: ModelSpec) -> tuple[int, ...]:
    """EAGLE-3's depths unless the config has others."""
    given = config.eagle_aux_hidden_state_layer_ids or config.eagle_config.eagle_aux_hidden_state_layer_ids
    taps = given or (2, spec.num_layers // 2, spec.num_layers - 3)
    check_taps(path, taps, spec.num_layers)
    return tuple(taps)


def _layer(tensors: _Tensors, layer: str, spec: ModelSpec, width: int) -> dict[str, Tensor]:
    """The decoder layer; its attention reads `width` vectors side by side. The feed-forward part has its own size."""
    hidden, heads = spec.hidden_size, spec.num_heads * spec.head_dim
    sizes = {"q": heads, "k": spec.num_kv_heads * spec.head_dim, "v": spec.num_kv_heads * spec.head_dim}
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    qkv = [tensors.take(f"{attention}.{x}_proj.weight", size, width * hidden) for x, size in sizes.items()]
    names, biases = {f"{attention}.{x}_proj.bias": size for x, size in sizes.items()}, list[Tensor]()
    if any(map(tensors.has, names)):
        biases = [tensors.take(name, size) for name, size in names.items()]
    middle = tensors.rows(f"{mlp}.gate_proj.weight") if tensors.has(f"{mlp}.gate_proj.weight") else 0
    gate_up = [tensors.take(f"{mlp}.{x}_proj.weight", middle, hidden) for x in ("gate", "up")]
    return {
        "qkv": torch.cat(qkv),
        "out": tensors.take(f"{attention}.o_proj.weight", hidden, heads),
        "gate_up": torch.cat(gate_up),
        "down": tensors.take(f"{mlp}.down_proj.weight", hidden, middle),
        "mlp_norm": tensors.take(f"{layer}.post_attention_layernorm.weight", hidden),
        **({"qkv_bias": torch.cat(biases)} if biases else {}),
    }


def _around(tensors: _Tensors, layer: str, spec: ModelSpec, taps: tuple[int, ...]) -> dict[str, Tensor]:
    """What stands before and behind the layer."""
    hidden = spec.hidden_size
    found: dict[str, Tensor | None] = {
        "fuse": tensors.take("fc.weight", hidden, (len(taps) or 2) * hidden),
        "fuse_bias": tensors.maybe("fc.bias", hidden),
    }
    if taps:
        found["embedding_norm"] = tensors.take(f"{layer}.input_layernorm.weight", hidden)
        found["input_norm"] = tensors.take(f"{layer}.hidden_norm.weight", hidden)
        found["norm"] = tensors.take("norm.weight", hidden)
    else:
        found["input_norm"] = tensors.maybe(f"{layer}.input_layernorm.weight", hidden)
        found["norm"] = tensors.maybe("norm.weight", hidden)
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _vocabulary(path: Path, tensors: _Tensors, spec: ModelSpec, weights: dict[str, Tensor]) -> Tensor:
    """[n] int64; puts the head's own output matrix, if it has one, into `weights`."""
    num = tensors.rows("lm_head.weight") if tensors.has("lm_head.weight") else spec.vocab_size
    if tensors.has("lm_head.weight"):
        weights["output"] = tensors.take("lm_head.weight", num, spec.hidden_size)
    token_ids = torch.arange(num)
    if (shift := tensors.maybe("d2t", num)) is not None:
        token_ids = token_ids + shift.long()
    check_tokens(path, token_ids, spec.vocab_size)
    return token_ids
