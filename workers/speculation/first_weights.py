"""Where the training of a head begins: least squares say how the target's next state follows from what the head sees.

Solved at once over all texts, this is right for about every third token; gradient descent would need hours to get
there. The layer begins as the target's last one whose outputs are zero, so it adds nothing before it has learnt to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.shm.spec import ModelSpec
from slipring.workers.loader import Weights
from slipring.workers.models.llama import Llama
from slipring.workers.speculation.head_files import shapes
from slipring.workers.speculation.training_texts import Text

_RIDGE = 0.005
"""Weight of the penalty, in shares of the mean square of the inputs."""
_LEAST_GAIN = 0.03
"""Directions that `join` shrinks by more than this, beside the largest, are not corrected through the taps."""
_SHARPNESS = 0.7
"""Of the first scores, beside the target's: a guess is less sure."""


def first_weights(
    spec: ModelSpec, taps: tuple[int, ...], checkpoint: Weights, model: Llama, texts: list[Text]
) -> dict[str, Tensor]:
    """All of `head_files.shapes`, float32."""
    hidden, prefix = spec.hidden_size, f"model.layers.{spec.num_layers - 1}"
    sizes = shapes(spec, taps)

    def copied(name: str, *parts: str) -> Tensor:
        shape = (sizes[name][0], hidden) if len(sizes[name]) == 2 else sizes[name]
        return checkpoint.fused([f"{prefix}.{part}.weight" for part in parts], shape)

    join, fuse = _least_squares(len(taps), model, texts)
    qkv = copied("qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj") * 0.5
    return {
        "fuse": fuse,
        "join": join,
        "qkv": torch.cat((qkv, qkv), 1),
        "out": torch.zeros(sizes["out"]),
        "gate_up": copied("gate_up", "mlp.gate_proj", "mlp.up_proj"),
        "down": torch.zeros(sizes["down"]),
        "mlp_norm": copied("mlp_norm", "post_attention_layernorm"),
        "norm": model.norm * _SHARPNESS,
        **{name: torch.ones(sizes[name]) for name in ("tap_norm", "embedding_norm", "input_norm")},
    }


def _least_squares(num_taps: int, model: Llama, texts: list[Text]) -> tuple[Tensor, Tensor]:
    """`join` [hidden, 2 * hidden], from embedding and last layer; `fuse` [hidden, taps * hidden], which hands the last
    layer through and adds what else the taps tell, turned so that `join` makes of it what it should."""
    hidden = model.embedding.shape[1]
    squares = torch.zeros((num_taps + 1) * hidden, (num_taps + 1) * hidden)
    products = torch.zeros(len(squares), hidden)
    for text in texts:
        at = slice(max(0, text.num_common - 2), -1)
        embedded = F.rms_norm(F.embedding(text.tokens[1:], model.embedding)[at.start :], (hidden,), eps=model.eps)
        x = torch.cat((text.streams[at].float().flatten(1), embedded), 1)
        squares.addmm_(x.T, x)
        products.addmm_(x.T, text.streams[at.start + 1 :, -1].float())
    every = torch.arange(len(squares))
    chained, tapped = every[(num_taps - 1) * hidden :], every[: num_taps * hidden]
    first = _solve(squares, products, chained)
    correction = _solve(squares, products - squares[:, chained] @ first, tapped)
    of_feature, of_embedding = first[:hidden].T, first[hidden:].T
    u, gain, v = torch.linalg.svd(of_feature)
    inverse = v.T @ torch.diag(gain / (gain**2 + (_LEAST_GAIN * gain[0]) ** 2)) @ u.T
    through = torch.cat((torch.zeros(hidden, (num_taps - 1) * hidden), torch.eye(hidden)), 1)
    return torch.cat((of_embedding, of_feature), 1), through + inverse @ correction.T


def _solve(squares: Tensor, products: Tensor, at: Tensor) -> Tensor:
    """Ridge regression on some of the inputs: [len(at), hidden]."""
    own = squares[at][:, at]
    penalty = _RIDGE * own.diagonal().mean().clamp(min=1e-6)
    return torch.linalg.solve(own + penalty * torch.eye(len(at)), products[at])
