"""An EAGLE head: one decoder layer that guesses the target's next feature from its last one, and from the next token.

Input at position p is the target's feature there and the embedding of the token at p + 1; the output stands for the
feature at p + 1, whose scores are of the token at p + 2. Fed with its own output, the head guesses further.

Designs, the first two by Li et al.:
- EAGLE (2024): the feature is the target's normed last hidden state; the embedding is fused with it into the layer's
  input. A head may norm its input and its output, which the published ones do not.
- EAGLE-3 (2025), which a head with `taps` is: the feature is fused from the residual stream at a few depths, the
  layer's attention reads the embedding and the feature side by side, and the output is normed only to be scored.
- Our own, an EAGLE-3 head with `join`: the layer adds to what a matrix makes of embedding and feature, not to the
  feature. Least squares give that matrix, so training begins with a head that is right every third time.

`token_ids` are the head's vocabulary. Weights by name, matrices (out, in):

| name | shape | |
|---|---|---|
| fuse | hidden, n * hidden | embedding and feature (EAGLE), or the residual stream at n taps (EAGLE-3) |
| fuse_bias, qkv_bias | | if the head has them |
| tap_norm | n, hidden | EAGLE-3, if each tap is normed before it is fused |
| embedding_norm | hidden | EAGLE-3 |
| join | hidden, 2 * hidden | normed embedding and feature, our own design |
| input_norm | hidden | of the layer's input (EAGLE, if any), of the feature (EAGLE-3) |
| qkv, out, mlp_norm, gate_up, down | | the layer |
| norm | hidden | of the layer's output (EAGLE: if any) |
| output | n, hidden | of the head's vocabulary; without it the target's rows are used |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.kernels.rmsnorm import rmsnorm
from slipring.shm.spec import ModelSpec

Attend = Callable[[Tensor, Tensor], Tensor]
"""(heads of q and k [T, H + KVH, D], not turned yet, v [T, KVH, D]) -> [T, H * D]"""
Multiply = Callable[[Tensor, str], Tensor]
"""(x [T, in], a matrix's name) -> [T, out]"""
MATRICES = ("fuse", "qkv", "out", "gate_up", "down", "output", "join")


@dataclass(frozen=True, slots=True)
class EagleHead:
    """The head's computation."""

    spec: ModelSpec
    """The target's, but for the head's `rms_norm_eps`."""
    weights: dict[str, Tensor]
    """With `output`."""
    token_ids: Tensor
    """[n] int64"""
    taps: tuple[int, ...] = ()
    """The residual stream behind so many layers each; none: an EAGLE head."""
    multiply: Multiply | None = None
    """Products with the matrices, where they are kept in another form than in `weights`."""
    cos_sin: Tensor | None = None
    """[max_model_len, 2, head_dim]: the head's own rotation; None: the target's."""

    def first(self, normed: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        """The target's features, [T, hidden]: from its normed last hidden states [T, hidden], or from each tap's
        residual stream [T, hidden]."""
        if not self.taps:
            return normed
        if (norms := self.weights.get("tap_norm")) is not None:
            tapped = [self._norm(x, norm) for x, norm in zip(tapped, norms, strict=True)]
        return self._fuse(torch.cat(list(tapped), 1))

    def forward(self, embedded: Tensor, feature: Tensor, attend: Attend) -> Tensor:
        """embedded, feature [T, hidden] -> guessed features [T, hidden]."""
        weights, multiply = self.weights, self._multiply
        if self.taps:
            normed = self._norm(embedded, weights["embedding_norm"]), self._norm(feature, weights["input_norm"])
            read = torch.cat(normed, 1)
            x = multiply(read, "join") if "join" in weights else feature
        else:
            x = self._fuse(torch.cat((embedded, feature), 1))
            read = self._norm(x, weights.get("input_norm"))
        heads = multiply(read, "qkv")
        if (bias := weights.get("qkv_bias")) is not None:
            heads = heads + bias
        heads = heads.view(len(x), -1, self.spec.head_dim)
        turning, value = heads[:, : -self.spec.num_kv_heads], heads[:, -self.spec.num_kv_heads :]
        x = x + multiply(attend(turning, value), "out")
        gate, up = multiply(self._norm(x, weights["mlp_norm"]), "gate_up").chunk(2, 1)
        x = x + multiply(F.silu(gate) * up, "down")
        return x if self.taps else self._norm(x, weights.get("norm"))

    def scores(self, feature: Tensor) -> Tensor:
        """[T, hidden] -> [T, n], by the head's vocabulary."""
        normed = self._norm(feature, self.weights["norm"]) if self.taps else feature
        return self._multiply(normed, "output")

    def _multiply(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name]) if self.multiply is None else self.multiply(x, name)

    def _fuse(self, x: Tensor) -> Tensor:
        fused = self._multiply(x, "fuse")
        bias = self.weights.get("fuse_bias")
        return fused if bias is None else fused + bias

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rmsnorm(x, weight, self.spec.rms_norm_eps)[0]
