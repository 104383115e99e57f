"""Training a draft head on what a model wrote: `python -m slipring.workers.speculation.training`, started by
`runtime/train_draft.py` with a `DraftTraining` on stdin; answers with a `TrainingReport` a line.

The target's residual streams are computed once and kept. The head begins with what least squares say
(`first_weights.py`), and learns the target's distribution over its vocabulary and its most likely token, from the
target's features and again from its own guesses, with the keys and values that it will have then, since that is what
a chain feeds it with. It is saved after each epoch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.shm.spec import DraftTraining, TrainingReport
from slipring.workers.loader import Weights
from slipring.workers.models.registry import build_model
from slipring.workers.speculation.acceptance import served_chains, shares
from slipring.workers.speculation.chain_attention import Past, chain_attention, shifted
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.first_weights import first_weights
from slipring.workers.speculation.head_files import save_head
from slipring.workers.speculation.training_texts import CONTEXT, Lesson, Text, lesson, lessons, read_texts, taps_of

_RATE, _LEAST_SHARE, _WARM_STEPS = 6e-4, 0.03, 30
_SOLVED, _SOLVED_RATE = ("join", "fuse"), 0.3
"""What least squares gave moves more slowly."""
_DEPTHS = ((1.0, 0.5), (0.7, 0.25), (0.5, 0.25))
"""(weight of a depth's loss, share of the lessons that end with it): most is to be learnt about first guesses."""
_HARD = 0.5
"""Share of the loss that asks for the target's most likely token alone, rather than its distribution."""
_HELD_OUT, _MOST_HELD = 0.08, 48
"""Share and number of the texts that are not learnt from."""
_CHAIN = 5
"""Drafts whose acceptance is reported."""
Report = Callable[[TrainingReport], None]


class Trainer:
    def __init__(self, training: DraftTraining, report: Report) -> None:
        self._training, self._report, self._spec = training, report, training.model
        self._random = random.Random(training.seed)
        self.taps = taps_of(self._spec)
        checkpoint = Weights(self._spec, torch.float32)
        with torch.inference_mode():
            model = build_model(self._spec, checkpoint, CONTEXT + 1)
        texts = read_texts(training, model, self.taps, lambda done, total: self._tell("read", done, total, ""))
        self.held, self._learnt = self._split(texts)
        self.token_ids = self._frequent_tokens()
        # Clones: what inference mode made cannot be saved for a backward pass.
        with torch.inference_mode():
            found = first_weights(self._spec, self.taps, checkpoint, model, self._learnt)
            output = model.output_rows(self.token_ids)
        self.weights = {name: weight.clone() for name, weight in found.items()}
        self._head = EagleHead(self._spec, self.weights | {"output": output.clone()}, self.token_ids, self.taps)
        self._embedding, self._norm = model.embedding.clone(), model.norm.clone()
        self._cos_sin = model.cos_sin.clone()
        checkpoint.close()

    def run(self) -> TrainingReport:
        """Train and save; returns the last report."""
        parameters = [weight.requires_grad_() for weight in self.weights.values()]
        optimizer = self._optimizer()
        epochs, done = self._training.epochs, 0
        total, accepted = epochs * len(lessons(self._learnt)), self.accepted()
        for epoch in range(1, epochs + 1):
            self._random.shuffle(self._learnt)
            words = f", held-out mean accepted length {1 + sum(accepted):.2f}"
            for group in lessons(self._learnt):
                for part in optimizer.param_groups:
                    part["lr"] = part["rate"] * _schedule(done, total)
                loss = self._loss(lesson(group))
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                done += 1
                self._tell("train", min(done, total), total, f"loss {loss.item():.2f}{words}")
            accepted = self.accepted()
            about = {"model": self._spec.name, "epochs": epoch, "accepted": accepted}
            save_head(Path(self._training.output), self._head, about)
        return TrainingReport(phase="train", done=1, total=1, words="", accepted=accepted, final=True)

    @torch.no_grad()
    def accepted(self, texts: list[Text] | None = None, chain: int = _CHAIN) -> list[float]:
        """The share of steps in which the first, second, ... of `chain` drafts is accepted, when texts (None: those
        that were held out) are served greedily."""
        steps: list[np.ndarray] = []
        for group in lessons(self.held if texts is None else texts):
            given, past, right = lesson(group), [], []
            first = feature = self._first(given)
            wanted = torch.cat([F.pad(text.tokens[2:], (0, 1), value=-1) for text in group])
            for _ in range(chain):
                guessed = self._guess(given, feature, past)
                right.append(self.token_ids[self._head.scores(guessed).argmax(1)] == wanted)
                feature = shifted(guessed, first, given.lengths)
            for text, *parts in zip(group, *[part.split(given.lengths) for part in right], strict=True):
                # The draft of depth d that stands at p belongs to the chain that begins at p - d. The last position
                # of a text guesses a token that was not written.
                num = len(text.tokens) - 2
                chains = torch.stack([F.pad(part[d:num], (0, d)) for d, part in enumerate(parts)], 1)
                steps.append(served_chains(chains.numpy(), text.num_prompt - 1))
        return shares(np.concatenate(steps), chain) if steps else [0.0] * chain

    def _split(self, texts: list[Text]) -> tuple[list[Text], list[Text]]:
        """(held out, learnt): only greedy texts say what a greedy target would accept."""
        self._random.shuffle(texts)
        greedy = [i for i, text in enumerate(texts) if text.greedy]
        most = max(1, min(_MOST_HELD, round(len(texts) * _HELD_OUT)))
        held = set(greedy[:most])
        learnt = [text for i, text in enumerate(texts) if i not in held]
        return [texts[i] for i in sorted(held)], learnt or texts

    def _optimizer(self) -> torch.optim.Optimizer:
        groups = [
            {"params": [w for name, w in self.weights.items() if (name in _SOLVED) is solved], "rate": rate}
            for solved, rate in ((True, _RATE * _SOLVED_RATE), (False, _RATE))
        ]
        return torch.optim.AdamW(groups, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def _loss(self, given: Lesson) -> Tensor:
        counts = given.counts
        with torch.no_grad():
            scores = F.linear(given.wanted[counts] * self._norm, self._head.weights["output"])
            wanted = F.softmax(scores, 1).mul_(1 - _HARD)
            wanted.scatter_add_(1, scores.argmax(1, keepdim=True), torch.full((len(scores), 1), _HARD))
        first = feature = self._first(given)
        loss, past = torch.zeros(()), []
        for weight, _ in _DEPTHS[: self._random.choices(range(1, len(_DEPTHS) + 1), [d[1] for d in _DEPTHS])[0]]:
            guessed = self._guess(given, feature, past)
            loss = loss - weight * (wanted * F.log_softmax(self._head.scores(guessed[counts]), 1)).sum(1).mean()
            feature = shifted(guessed, first, given.lengths)
        return loss

    def _first(self, given: Lesson) -> Tensor:
        return self._head.first(given.wanted, list(given.streams))

    def _guess(self, given: Lesson, feature: Tensor, past: Past) -> Tensor:
        """One guess more, made from `feature`, which the last guess gave; `past` goes along from guess to guess."""
        attend = chain_attention(self._spec, self._cos_sin[given.position], given.lengths, past)
        return self._head.forward(F.embedding(given.following, self._embedding), feature, attend)

    def _frequent_tokens(self) -> Tensor:
        """[n] int64, rising: what the model wrote most, and its ends of sequence."""
        counts = np.zeros(self._spec.vocab_size, np.int64)
        for text in self._learnt:
            np.add.at(counts, text.tokens[text.num_common : text.num_prompt].numpy(), 1)
            np.add.at(counts, text.tokens[text.num_prompt :].numpy(), 4)  # answers are what is served
        counts[list(self._spec.eos_token_ids)] += counts.max() + 1
        size = min(self._training.vocab_size, len(counts))
        return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))

    def _tell(self, phase: str, done: int, total: int, words: str) -> None:
        self._report(TrainingReport(phase=phase, done=done, total=total, words=words))


def _schedule(step: int, total: int) -> float:
    """Warm up, then a line down to a small share."""
    left = 1 - min(1.0, step / max(1, total))
    return min(1.0, (step + 1) / _WARM_STEPS) * (_LEAST_SHARE + (1 - _LEAST_SHARE) * left)


def main() -> int:
    training = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=DraftTraining)
    torch.manual_seed(training.seed)
    torch.set_num_threads(training.num_threads)

    def report(line: TrainingReport) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stdout.buffer.flush()

    report(Trainer(training, report).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
