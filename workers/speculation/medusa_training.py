"""Training Medusa heads: each learns what the target will say some tokens on, from its last hidden state."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.shm.spec import DraftTraining
from slipring.workers.loader import Weights
from slipring.workers.models.llama import Llama
from slipring.workers.speculation.medusa_head import Block, MedusaHeads, save_medusa
from slipring.workers.speculation.trainer import CHAIN, Report, Trainer
from slipring.workers.speculation.training_texts import Lesson

_FADING = 0.8
"""Weight of a head's loss beside that of the head before it."""


class MedusaTrainer(Trainer):
    rates = {"": 1e-3}  # noqa: RUF012

    def __init__(self, training: DraftTraining, report: Report) -> None:
        super().__init__(training, report, (training.model.num_layers,))
        blocks = [[Block(self.weights[f"{i}.weight"], self.weights[f"{i}.bias"])] for i in range(CHAIN)]
        self._medusa = MedusaHeads(blocks, [], self.token_ids)

    def first_weights(self, checkpoint: Weights, model: Llama) -> dict[str, Tensor]:
        """As the authors begin: every head says what the target says now."""
        hidden = self.spec.hidden_size
        shapes = {"weight": (hidden, hidden), "bias": (hidden,)}
        return {f"{i}.{name}": torch.zeros(shape) for i in range(CHAIN) for name, shape in shapes.items()}

    def loss(self, given: Lesson) -> Tensor:
        wanted = self.wanted(given.wanted)
        x, loss = given.streams[-1] * self.norm, torch.zeros(())
        # Head k at p guesses what the target says at p + 1 + k, which stands k places on, if the text goes on so far.
        left = torch.cat([torch.arange(length - 1, -1, -1) for length in given.lengths])
        for head in range(CHAIN):
            at = torch.nonzero(given.counts & (left >= head)).flatten()
            if len(at):
                scores = F.linear(self._medusa.hidden(head, x[at]), self.output)
                loss = loss - _FADING**head * (wanted[at + head] * F.log_softmax(scores, 1)).sum(1).mean()
        return loss

    def drafts(self, given: Lesson, chain: int) -> list[Tensor]:
        x = given.streams[-1] * self.norm
        scores = [F.linear(self._medusa.hidden(head, x), self.output) for head in range(min(chain, CHAIN))]
        return [self.token_ids[each.argmax(1)] for each in scores]

    def save(self, about: dict[str, object]) -> None:
        save_medusa(Path(self.training.output), self._medusa, about)
