"""`Trainer`: how a draft head learns from what a model wrote, whatever the head is.

The target's residual streams are computed once and kept. The head learns the target's distribution over its
vocabulary, and its most likely token. It is saved after each epoch.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.shm.spec import DraftTraining, TrainingReport
from slipring.workers.loader import Weights
from slipring.workers.models.llama import Llama
from slipring.workers.models.registry import build_model
from slipring.workers.speculation.acceptance import served_chains, shares
from slipring.workers.speculation.training_texts import CONTEXT, Lesson, Text, lesson, lessons, read_texts

_LEAST_SHARE, _WARM_STEPS = 0.03, 30
_AVERAGED = 0.1
"""Share of the steps, the latest ones, whose weights are averaged to what is kept."""
_HARD = 0.5
"""Share of the loss that asks for the target's most likely token alone, rather than its distribution."""
_HELD_OUT, _MOST_HELD = 0.08, 48
"""Share and number of the texts that are not learnt from."""
CHAIN = 5
"""Drafts whose acceptance is reported."""
Report = Callable[[TrainingReport], None]


class Trainer(ABC):
    """What methods have in common; each has a module of its own."""

    rates: dict[str, float]
    """Learning rates by the weights' names; "" for those that are not named."""

    def __init__(self, training: DraftTraining, report: Report, taps: tuple[int, ...]) -> None:
        self.training, self.spec, self.taps = training, training.model, taps
        self.random = random.Random(training.seed)
        self._report = report
        checkpoint = Weights(self.spec, torch.float32)
        with torch.inference_mode():
            model = build_model(self.spec, checkpoint, CONTEXT + 1)
        texts = read_texts(training, model, taps, lambda done, total: self._tell("read", done, total, ""))
        self.held, self.learnt = self._split(texts)
        self.token_ids = self.vocabulary()
        # Clones: what inference mode made cannot be saved for a backward pass.
        with torch.inference_mode():
            found, output = self.first_weights(checkpoint, model), model.output_rows(self.token_ids)
        checkpoint.close()
        self.weights, self.output = {name: weight.clone() for name, weight in found.items()}, output.clone()
        self.embedding, self.norm, self.cos_sin = model.embedding.clone(), model.norm.clone(), model.cos_sin.clone()

    @abstractmethod
    def first_weights(self, checkpoint: Weights, model: Llama) -> dict[str, Tensor]:
        """Where training begins."""

    def vocabulary(self) -> Tensor:
        """[n] int64, rising: the tokens that the head can guess. These are what the model wrote most, and its ends of
        sequence."""
        counts = np.zeros(self.spec.vocab_size, np.int64)
        for text in self.learnt:
            np.add.at(counts, text.tokens[text.num_common : text.num_prompt].numpy(), 1)
            np.add.at(counts, text.tokens[text.num_prompt :].numpy(), 4)  # answers are what is served
        counts[list(self.spec.eos_token_ids)] += counts.max() + 1
        size = min(self.training.vocab_size, len(counts))
        return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))

    @abstractmethod
    def loss(self, given: Lesson) -> Tensor:
        """Of one lesson."""

    @abstractmethod
    def drafts(self, given: Lesson, chain: int) -> list[Tensor]:
        """[T] int64 each: the first, second, ... draft of greedy chains that begin at each position, where they stay
        within the text."""

    @abstractmethod
    def save(self, about: dict[str, object]) -> None:
        """Write the head's directory."""

    def run(self) -> TrainingReport:
        """Train and save; returns the last report."""
        parameters = [weight.requires_grad_() for weight in self.weights.values()]
        averages = [weight.detach().clone() for weight in parameters]
        optimizer = self._optimizer()
        epochs, done = self.training.epochs, 0
        total, accepted = epochs * len(lessons(self.learnt)), self.accepted()
        for epoch in range(1, epochs + 1):
            self.random.shuffle(self.learnt)
            words = f", held-out mean accepted length {1 + sum(accepted):.2f}"
            for group in lessons(self.learnt):
                for part in optimizer.param_groups:
                    part["lr"] = part["rate"] * _schedule(done, total)
                loss = self.loss(lesson(group))
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                done += 1
                _average(averages, parameters, max(1 / done, 1 / (1 + _AVERAGED * total)))
                self._tell("train", min(done, total), total, f"loss {loss.item():.2f}{words}")
            with self._averaged(averages, parameters):
                accepted = self.accepted()
                self.save({"model": self.spec.name, "epochs": epoch, "accepted": accepted})
        _copy(averages, parameters)
        return TrainingReport(phase="train", done=1, total=1, words="", accepted=accepted, final=True)

    @torch.no_grad()
    def accepted(self, texts: list[Text] | None = None, chain: int = CHAIN) -> list[float]:
        """The share of steps in which the first, second, ... of `chain` drafts is accepted, when texts (None: those
        that were held out) are served greedily."""
        steps: list[np.ndarray] = []
        for group in lessons(self.held if texts is None else texts):
            given = lesson(group)
            found = [draft.split(given.lengths) for draft in self.drafts(given, chain)]
            for text, *drafts in zip(group, *found, strict=True):
                # The first draft at p is of the token at p + 2. The last position guesses one that was not written.
                wanted = F.pad(text.tokens[2:], (0, chain), value=-1)
                num = len(text.tokens) - 2
                right = torch.stack([draft[:num] == wanted[d : d + num] for d, draft in enumerate(drafts)], 1)
                steps.append(served_chains(right.numpy(), text.num_prompt - 1))
        return shares(np.concatenate(steps), chain) if steps else [0.0] * chain

    @contextmanager
    def _averaged(self, averages: list[Tensor], parameters: list[Tensor]) -> Iterator[None]:
        """The weights are their averages."""
        latest = [weight.detach().clone() for weight in parameters]
        _copy(averages, parameters)
        yield
        _copy(latest, parameters)

    @torch.no_grad()
    def wanted(self, states: Tensor) -> Tensor:
        """The target's distribution over the vocabulary, half of it its most likely token: [n, hidden], of unit
        length, to [n, tokens]."""
        scores = F.linear(states * self.norm, self.output)
        wanted = F.softmax(scores, 1).mul_(1 - _HARD)
        return wanted.scatter_add_(1, scores.argmax(1, keepdim=True), torch.full((len(scores), 1), _HARD))

    def _split(self, texts: list[Text]) -> tuple[list[Text], list[Text]]:
        """(held out, learnt): only greedy texts say what a greedy target would accept."""
        self.random.shuffle(texts)
        greedy = [i for i, text in enumerate(texts) if text.greedy]
        most = max(1, min(_MOST_HELD, round(len(texts) * _HELD_OUT)))
        held = set(greedy[:most])
        learnt = [text for i, text in enumerate(texts) if i not in held]
        return [texts[i] for i in sorted(held)], learnt or texts

    def _optimizer(self) -> torch.optim.Optimizer:
        groups = [{"params": [w], "rate": self.rates.get(name, self.rates[""])} for name, w in self.weights.items()]
        return torch.optim.AdamW(groups, lr=self.rates[""], betas=(0.9, 0.95), weight_decay=0.0)

    def _tell(self, phase: str, done: int, total: int, words: str) -> None:
        self._report(TrainingReport(phase=phase, done=done, total=total, words=words))


@torch.no_grad()
def _average(averages: list[Tensor], parameters: list[Tensor], share: float) -> None:
    for average, weight in zip(averages, parameters, strict=True):
        average.lerp_(weight, share)


@torch.no_grad()
def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    for value, weight in zip(source, target, strict=True):
        weight.copy_(value)


def _schedule(step: int, total: int) -> float:
    """Warm up, then a line down to a small share."""
    left = 1 - min(1.0, step / max(1, total))
    return min(1.0, (step + 1) / _WARM_STEPS) * (_LEAST_SHARE + (1 - _LEAST_SHARE) * left)
