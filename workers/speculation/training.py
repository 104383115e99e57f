"""Training an EAGLE head on what a model wrote: `python -m slipring.workers.speculation.training`, started by
`runtime/train_draft.py` with a `DraftTraining` on stdin; answers with a `TrainingReport` a line.

The target's hidden states are computed once and kept. The head learns to give the target's own distribution over its
vocabulary (cross-entropy) and its hidden state (smooth L1), from the target's hidden state and again from its own
guess of it, with the keys and values that it will have then, since that is what a chain feeds it with. It begins as
the target's last layer, which is close to what it must become.
"""

from __future__ import annotations

import functools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.kernels.paged_attention import AttentionPlan, Chunk
from slipring.kernels.rope import rope
from slipring.shm.spec import DraftTraining, ModelSpec, TrainingReport
from slipring.workers.attention import PlannedAttention
from slipring.workers.batch import Batch
from slipring.workers.kv_cache import KvCache
from slipring.workers.loader import Weights
from slipring.workers.models.llama import Llama
from slipring.workers.models.registry import build_model
from slipring.workers.speculation.eagle_head import EagleHead
from slipring.workers.speculation.head_files import save_head, shapes

_CONTEXT = 512
"""Tokens of a text that are learnt from."""
_READ_TOKENS = 2048
_BATCH_TOKENS = 1024
_RATE, _LEAST_SHARE, _WARM_STEPS = 1.5e-3, 0.05, 20
_DEPTHS = (1.0, 0.7)
"""Weights of the losses of the first guess, and of the one made from it."""
_HELD_OUT = 0.08
"""Share of the texts that are not learnt from."""
_CHAIN = 5
"""Drafts whose acceptance is reported."""
_BLOCK = 16
_NOISE = 0.1
Report = Callable[[TrainingReport], None]
Past = list[tuple[Tensor, Tensor]]
"""Keys and values [T, H, D] of each guess so far, the first of them made from the target's hidden states."""


@dataclass(frozen=True, slots=True)
class Text:
    tokens: Tensor
    """[n] int64"""
    num_prompt: int
    hidden: Tensor
    """[n, hidden], normed, half precision."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Texts side by side, T positions: input (hidden state at p, token at p + 1), target (hidden state at p + 1)."""

    hidden: Tensor
    following: Tensor
    target: Tensor
    position: Tensor
    lengths: list[int]
    counts: Tensor
    """[T] bool: positions whose guess is of a token that the model wrote."""


class Trainer:
    def __init__(self, training: DraftTraining, report: Report) -> None:
        self._training, self._report, self._spec = training, report, training.model
        self._random = random.Random(training.seed)
        weights = Weights(self._spec, torch.float32)
        with torch.inference_mode():
            self._model = build_model(self._spec, weights, _CONTEXT + 1)
        self.token_ids = self._frequent_tokens()
        # Clones: what inference mode made cannot be saved for a backward pass.
        output = self._model.output_rows(self.token_ids).clone()
        self._embedding = self._model.embedding.clone()
        self._cos_sin = self._model.cos_sin.clone()
        self.weights = _first_weights(self._spec, weights, self._model)
        self._head = EagleHead(self._spec, self.weights | {"output": output}, self.token_ids)
        weights.close()

    def run(self) -> TrainingReport:
        """Train and save; returns the last report."""
        training, texts = self._training, self._read()
        self._random.shuffle(texts)
        num_held = max(1, round(len(texts) * _HELD_OUT))
        held, learnt = texts[:num_held], texts[num_held:] or texts
        self._learn(learnt, held)
        accepted = self.accepted(held)
        about = {"model": self._spec.name, "epochs": training.epochs, "accepted": accepted}
        save_head(Path(training.output), self._head, about)
        return TrainingReport(phase="train", done=1, total=1, words="", accepted=accepted, final=True)

    @torch.no_grad()
    def accepted(self, texts: list[Text]) -> list[float]:
        """Of held-out texts: the share of first, second, ... drafts that a greedy target accepts."""
        totals, num = np.zeros(_CHAIN), 0
        for lesson in _lessons(texts):
            best = self._head.scores(lesson.target).argmax(1)
            hidden, right, past = lesson.hidden, lesson.counts.clone(), []
            for depth in range(_CHAIN):
                guessed = self._guess(lesson, hidden, past)
                right &= self._head.scores(guessed).argmax(1) == best
                totals[depth] += int((right & lesson.counts).sum())
                hidden, right = _shift(guessed, lesson.hidden, lesson.lengths), _shift_flags(right, lesson)
            num += int(lesson.counts.sum())
        return [round(float(total) / max(1, num), 4) for total in totals]

    def _learn(self, texts: list[Text], held: list[Text]) -> None:
        parameters = [weight.requires_grad_() for weight in self.weights.values()]
        optimizer = torch.optim.AdamW(parameters, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        total, done, words = self._training.epochs * len(_lessons(texts)), 0, ""
        for _ in range(self._training.epochs):
            self._random.shuffle(texts)
            for lesson in _lessons(texts):
                for group in optimizer.param_groups:
                    group["lr"] = _RATE * _schedule(done, total)
                loss = self._loss(lesson)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                done += 1
                self._tell("train", min(done, total), total, f"loss {loss.item():.2f}{words}")
            accepted = self.accepted(held)
            words = f", held-out mean accepted length {1 + sum(accepted):.2f}"

    def _loss(self, lesson: Lesson) -> Tensor:
        with torch.no_grad():
            wanted = F.softmax(self._head.scores(lesson.target[lesson.counts]), 1)
        hidden = lesson.hidden + (torch.rand_like(lesson.hidden) - 0.5) * _NOISE
        loss, past = torch.zeros(()), []
        for weight in _DEPTHS:
            guessed = self._guess(lesson, hidden, past)
            scores = F.log_softmax(self._head.scores(guessed[lesson.counts]), 1)
            apart = F.smooth_l1_loss(guessed[lesson.counts], lesson.target[lesson.counts])
            loss = loss + weight * (apart - (wanted * scores).sum(1).mean())
            hidden = _shift(guessed, lesson.hidden, lesson.lengths)
        return loss

    def _guess(self, lesson: Lesson, hidden: Tensor, past: Past) -> Tensor:
        """One guess more, made from `hidden`, which the last guess gave; `past` goes along from guess to guess."""
        turn = self._cos_sin[lesson.position].unsqueeze(2).unbind(1)
        embedded = F.embedding(lesson.following, self._embedding)
        attend = _attend(self._spec, turn, lesson.lengths, past)
        return self._head.forward(embedded, hidden, attend)

    def _frequent_tokens(self) -> Tensor:
        """[n] int64, rising: what the model wrote most, and its ends of sequence."""
        counts = np.zeros(self._spec.vocab_size, np.int64)
        for tokens, num_prompt in zip(self._training.written, self._training.prompts, strict=True):
            np.add.at(counts, tokens[num_prompt:], 1)
        counts[list(self._spec.eos_token_ids)] += counts.max() + 1
        size = min(self._training.vocab_size, len(counts))
        return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))

    @torch.inference_mode()
    def _read(self) -> list[Text]:
        """The hidden states of everything that was written."""
        kv = KvCache(self._spec, (_READ_TOKENS + _CONTEXT) // _BLOCK + 1, _BLOCK, torch.float32)
        pairs = zip(self._training.written, self._training.prompts, strict=True)
        waiting = [(tokens[:_CONTEXT], num_prompt) for tokens, num_prompt in pairs if len(tokens) > num_prompt + 2]
        texts: list[Text] = []
        total = len(waiting)
        while waiting:
            group = []
            while waiting and sum(len(tokens) for tokens, _ in group) < _READ_TOKENS:
                group.append(waiting.pop())
            hidden = self._hidden_states([tokens for tokens, _ in group], kv)
            texts += [
                Text(torch.tensor(tokens), num_prompt, part)
                for (tokens, num_prompt), part in zip(group, hidden, strict=True)
            ]
            self._tell("read", total - len(waiting), total, "")
        return texts

    def _hidden_states(self, texts: list[list[int]], kv: KvCache) -> list[Tensor]:
        lengths = [len(tokens) for tokens in texts]
        ends = np.cumsum(lengths).tolist()
        position = torch.cat([torch.arange(length) for length in lengths])
        chunks = [Chunk(end - length, end, length, None, None) for end, length in zip(ends, lengths, strict=True)]
        every = torch.arange(ends[-1])
        plan = AttentionPlan(slot_mapping=every, groups=[], chunks=chunks)
        ids = torch.tensor([token for tokens in texts for token in tokens])
        hidden = self._model.hidden(Batch(ids, position, PlannedAttention(plan, position), every), kv)
        return [part.half().clone() for part in self._model.normed(hidden, every).split(lengths)]

    def _tell(self, phase: str, done: int, total: int, words: str) -> None:
        self._report(TrainingReport(phase=phase, done=done, total=total, words=words))


def _first_weights(spec: ModelSpec, weights: Weights, model: Llama) -> dict[str, Tensor]:
    """The target's last layer, and a fusion that hands the hidden state through."""
    prefix, size = f"model.layers.{spec.num_layers - 1}", spec.hidden_size
    parts = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
        "input_norm": ("input_layernorm",),
        "mlp_norm": ("post_attention_layernorm",),
    }
    found = {
        name: weights.fused([f"{prefix}.{part}.weight" for part in parts[name]], shape)
        for name, shape in shapes(spec).items()
        if name in parts
    }
    generator = torch.Generator().manual_seed(0)
    # Embeddings are small beside normed hidden states; the token that was drawn must weigh as much from the start.
    alike = float(model.norm.abs().mean() / model.embedding.std())
    fuse = torch.cat((torch.eye(size) * alike, torch.eye(size)), 1)
    found["fuse"] = fuse + torch.randn(fuse.shape, generator=generator) * 0.01
    found["norm"] = model.norm.clone()
    return found


def _lessons(texts: list[Text]) -> list[Lesson]:
    found: list[list[Text]] = [[]]
    for text in texts:
        if sum(len(each.tokens) for each in found[-1]) + len(text.tokens) > _BATCH_TOKENS and found[-1]:
            found.append([])
        found[-1].append(text)
    return [_lesson(group) for group in found]


def _lesson(texts: list[Text]) -> Lesson:
    lengths = [len(text.tokens) - 1 for text in texts]
    # Input position p guesses the token at p + 2: the first one that the model wrote stands at num_prompt.
    counts = [torch.arange(length) >= text.num_prompt - 2 for text, length in zip(texts, lengths, strict=True)]
    return Lesson(
        torch.cat([text.hidden[:-1] for text in texts]).float(),
        torch.cat([text.tokens[1:] for text in texts]),
        torch.cat([text.hidden[1:] for text in texts]).float(),
        torch.cat([torch.arange(length) for length in lengths]),
        lengths,
        torch.cat(counts),
    )


def _shift(guessed: Tensor, first: Tensor, lengths: list[int]) -> Tensor:
    """A guess at p stands for the hidden state at p + 1: there it is the next input. A text's first is the target's."""
    pairs = zip(guessed.split(lengths), first.split(lengths), strict=True)
    return torch.cat([torch.cat((target[:1], guess[:-1])) for guess, target in pairs])


def _shift_flags(right: Tensor, lesson: Lesson) -> Tensor:
    """A draft counts only if the one before it, which stands one position earlier, was right."""
    return torch.cat([F.pad(part[:-1], (1, 0)) for part in right.split(lesson.lengths)]) & lesson.counts


def _attend(
    spec: ModelSpec, turn: tuple[Tensor, ...], lengths: list[int], past: Past
) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention within each text, as a chain has it: what the target has computed is seen by its own keys, and only
    the guesses since then by theirs. Adds this guess's keys and values to `past`."""
    groups = spec.num_heads // spec.num_kv_heads

    def attend(heads: Tensor, value: Tensor) -> Tensor:
        turned = rope(heads, turn[0], turn[1])
        query, key = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
        past.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        out, begin = [], 0
        for length in lengths:
            at = slice(begin, begin + length)
            q = query[at].transpose(0, 1)[None]
            k, v = (torch.cat([each[i][at] for each in past]).transpose(0, 1)[None] for i in range(2))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=_chain_mask(length, len(past)))
            out.append(mixed[0].transpose(0, 1).flatten(1))
            begin += length
        return torch.cat(out)

    return attend


@functools.lru_cache(maxsize=4096)
def _chain_mask(length: int, depth: int) -> Tensor:
    """[length, depth * length] bool: the guess of depth d at position t sees the first keys up to t - d + 1, and of
    each later depth j those at t - d + j."""
    at, key = torch.arange(length)[:, None], torch.arange(length)
    first = key <= at - (depth - 1)
    return torch.cat([first] + [key == at - depth + j for j in range(2, depth + 1)], 1)


def _schedule(step: int, total: int) -> float:
    """Warm up, then a cosine down to a small share."""
    falling = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
    return min(1.0, (step + 1) / _WARM_STEPS) * (_LEAST_SHARE + (1 - _LEAST_SHARE) * falling)


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
