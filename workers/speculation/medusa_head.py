"""Medusa heads (Cai et al. 2024): each guesses one token further, all from the target's last hidden state.

Head k turns the target's normed last hidden state at position p into scores of the token at p + 2 + k, through
residual blocks x + silu(W x + b) and an output matrix. They know no token that was drawn since, so they cost next to
nothing, keep no state, and guess less well than an EAGLE head.

Published heads (FasterDecoding/medusa-*: `medusa_lm_head.pt`, `.safetensors`, or vLLM's `model.safetensors`) hold
`medusa_head.N.B.linear.weight`, `.bias` for each block B and `medusa_head.N.B.weight` for the output matrix, with or
without the first part of the name. Ours hold int8 blocks, and use the target's output matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.shm.spec import ModelSpec
from slipring.workers.speculation.tensor_files import (
    WEIGHTS,
    check_shape,
    check_tokens,
    first_file,
    int8_tensors,
    read_tensors,
    write_head,
)

FILES = (WEIGHTS, "medusa_lm_head.safetensors", "medusa_lm_head.pt")
_NAME = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)(\.linear)?\.(weight|bias|codes|scale)")


@dataclass(frozen=True, slots=True)
class Block:
    weight: Tensor
    """[hidden, hidden]"""
    bias: Tensor
    """[hidden]"""


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    heads: list[list[Block]]
    """Of each head, its blocks."""
    outputs: list[Tensor]
    """[n, hidden] for each head; empty: the target's rows of `token_ids`."""
    token_ids: Tensor
    """[n] int64: the heads' vocabulary."""
    multiply: Callable[[Tensor, Tensor], Tensor] = F.linear
    """(x [T, in], weight) -> [T, out]"""

    def hidden(self, head: int, x: Tensor) -> Tensor:
        """x [T, hidden] -> what the output matrix of a head is multiplied with, [T, hidden]."""
        for block in self.heads[head]:
            x = x + F.silu(self.multiply(x, block.weight) + block.bias)
        return x


def save_medusa(path: Path, medusa: MedusaHeads, about: dict[str, object]) -> None:
    """Write the directory `path`: heads that use the target's output matrix."""
    stored = {"token_ids": medusa.token_ids.to(torch.int32)}
    for number, blocks in enumerate(medusa.heads):
        for place, block in enumerate(blocks):
            name = f"medusa_head.{number}.{place}.linear"
            stored |= int8_tensors(name, block.weight) | {f"{name}.bias": block.bias.detach().half()}
    write_head(path, stored, {"method": "medusa", **about})


def load_medusa(path: Path, spec: ModelSpec) -> MedusaHeads:
    """In float32. Raises OSError or SafetensorError, or ValueError that says what does not fit."""
    tensors = _read(path)
    token_ids = tensors.pop("token_ids", torch.arange(spec.vocab_size)).long()
    check_tokens(path, token_ids, spec.vocab_size)
    parts: dict[int, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if (found := _NAME.fullmatch(name)) is None:
            raise ValueError(f"{path}: {name}: not part of Medusa heads we know")
        number, place = int(found[1]), int(found[2])
        kind = found[4] if found[3] else "output"
        parts.setdefault(number, {}).setdefault(place, {})[kind] = tensor.float()
    if sorted(parts) != list(range(len(parts))) or not parts:
        raise ValueError(f"{path}: holds heads {sorted(parts)}; they must be numbered from 0")
    heads, outputs = [], []
    for number in range(len(parts)):
        blocks = [parts[number][place] for place in sorted(parts[number])]
        if "output" in blocks[-1]:
            output = blocks.pop()["output"]
            check_shape(path, f"the output matrix of head {number}", output, (len(token_ids), spec.hidden_size))
            outputs.append(output)
        heads.append([_block(path, f"{number}.{place}", block, spec) for place, block in enumerate(blocks)])
    if outputs and len(outputs) != len(heads):
        raise ValueError(f"{path}: {len(outputs)} of {len(heads)} heads have an output matrix; all or none must")
    return MedusaHeads(heads, outputs, token_ids)


def _block(path: Path, name: str, block: dict[str, Tensor], spec: ModelSpec) -> Block:
    if "codes" in block and "scale" in block:
        block["weight"] = block.pop("codes") * block.pop("scale")
    if set(block) != {"weight", "bias"}:
        raise ValueError(f"{path}: block {name} needs linear.weight and linear.bias; it has {', '.join(sorted(block))}")
    hidden = spec.hidden_size
    check_shape(path, f"{name}.linear.weight", block["weight"], (hidden, hidden))
    check_shape(path, f"{name}.linear.bias", block["bias"], (hidden,))
    return Block(block["weight"], block["bias"])


def _read(path: Path) -> dict[str, Tensor]:
    return read_tensors(first_file(path, FILES))
