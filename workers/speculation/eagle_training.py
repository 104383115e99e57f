"""Training an EAGLE head: from the target's features and again from its own guesses, with the keys and values that it
will have then, since that is what a chain feeds it with. It begins with what least squares say (`first_weights.py`).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.shm.spec import DraftTraining
from slipring.workers.loader import Weights
from slipring.workers.models.llama import Llama
from slipring.workers.speculation.chain_attention import Past, chain_attention, shifted
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.first_weights import first_weights
from slipring.workers.speculation.head_files import load_head, save_head, shapes
from slipring.workers.speculation.trainer import Report, Trainer
from slipring.workers.speculation.training_texts import CONTEXT, Lesson, taps_of

_DEPTHS = ((1.0, 0.5), (0.7, 0.25), (0.5, 0.25))
"""(weight of a depth's loss, share of the lessons that end with it): most is to be learnt about first guesses."""


def start_of(training: DraftTraining) -> EagleHead | None:
    """The head to go on with, if there is one. Raises what `load_head` raises, and ValueError when it was not trained
    here, for this model."""
    if training.start is None:
        return None
    head = load_head(Path(training.start), training.model, CONTEXT + 1)
    if head.weights.keys() != shapes(training.model, taps_of(training.model)).keys():
        raise ValueError(f"{training.start} is of another design than the heads that are trained here")
    return head


class EagleTrainer(Trainer):
    # What least squares gave moves more slowly.
    rates = {"": 6e-4, "join": 2e-4, "fuse": 2e-4}  # noqa: RUF012

    def __init__(self, training: DraftTraining, report: Report) -> None:
        """As `start_of`."""
        self._start = start_of(training)
        super().__init__(training, report, taps_of(training.model))
        self._head = EagleHead(self.spec, self.weights | {"output": self.output}, self.token_ids, self.taps)

    def vocabulary(self) -> Tensor:
        return super().vocabulary() if self._start is None else self._start.token_ids

    def first_weights(self, checkpoint: Weights, model: Llama) -> dict[str, Tensor]:
        if self._start is not None:
            return self._start.weights
        return first_weights(self.spec, self.taps, checkpoint, model, self.learnt)

    def loss(self, given: Lesson) -> Tensor:
        wanted, counts = self.wanted(given.wanted[given.counts]), given.counts
        first = feature = self._first(given)
        loss, past = torch.zeros(()), []
        for weight, _ in _DEPTHS[: self.random.choices(range(1, len(_DEPTHS) + 1), [d[1] for d in _DEPTHS])[0]]:
            guessed = self._guess(given, feature, past)
            loss = loss - weight * (wanted * F.log_softmax(self._head.scores(guessed[counts]), 1)).sum(1).mean()
            feature = shifted(guessed, first, given.lengths)
        return loss

    def drafts(self, given: Lesson, chain: int) -> list[Tensor]:
        found, past = [], []
        first = feature = self._first(given)
        for depth in range(chain):
            guessed = self._guess(given, feature, past)
            draft = self.token_ids[self._head.scores(guessed).argmax(1)]
            # What is guessed at p by the guess of this depth belongs to the chain that begins at p - depth.
            found.append(
                torch.cat([F.pad(part[depth:], (0, min(depth, len(part)))) for part in draft.split(given.lengths)])
            )
            feature = shifted(guessed, first, given.lengths)
        return found

    def save(self, about: dict[str, object]) -> None:
        save_head(Path(self.training.output), self._head, about)

    def _first(self, given: Lesson) -> Tensor:
        return self._head.first(given.wanted, list(given.streams))

    def _guess(self, given: Lesson, feature: Tensor, past: Past) -> Tensor:
        """One guess more, made from `feature`, which the last guess gave; `past` goes along from guess to guess."""
        attend = chain_attention(self.spec, self.cos_sin[given.position], given.lengths, past)
        return self._head.forward(F.embedding(given.following, self.embedding), feature, attend)
