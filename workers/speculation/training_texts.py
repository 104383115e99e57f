"""What a draft head learns from: texts with the target's residual streams, read once, and cut into lessons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipring.kernels.paged_attention import AttentionPlan, Chunk
from slipring.shm.spec import DraftTraining, ModelSpec
from slipring.workers.attention import PlannedAttention
from slipring.workers.batch import Batch
from slipring.workers.kv_cache import KvCache
from slipring.workers.models.llama import Llama

CONTEXT = 512
"""Tokens of a text that are learnt from."""
_READ_TOKENS = 2048
_BATCH_TOKENS = 1024
_BLOCK = 16
OnRead = Callable[[int, int], None]
"""(texts read, texts in all)"""


@dataclass(frozen=True, slots=True)
class Text:
    tokens: Tensor
    """[n] int64"""
    num_prompt: int
    num_common: int
    """Leading tokens that every text begins with: nothing is to be learnt there."""
    greedy: bool
    streams: Tensor
    """[n, taps, hidden] half: the residual stream at each tap, of unit length; the last tap is the last layer."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Texts side by side, T positions: input is the target at p and the token at p + 1, wanted is the target at p + 1,
    which draws the token at p + 2."""

    streams: Tensor
    """[taps, T, hidden]"""
    following: Tensor
    """[T] int64: the token at p + 1."""
    wanted: Tensor
    """[T, hidden]: the last layer at p + 1, of unit length."""
    position: Tensor
    lengths: list[int]
    counts: Tensor
    """[T] bool: positions to learn from."""


def taps_of(spec: ModelSpec) -> tuple[int, ...]:
    """EAGLE-3's depths, and the last layer."""
    last = spec.num_layers
    return tuple(sorted({min(2, last), max(1, last // 2), max(1, last - 3), last}))


@torch.inference_mode()
def read_texts(training: DraftTraining, model: Llama, taps: tuple[int, ...], on_read: OnRead) -> list[Text]:
    """The residual streams of everything that was written; `model` has room for CONTEXT + 1 positions."""
    spec = training.model
    kv = KvCache(spec, (_READ_TOKENS + CONTEXT) // _BLOCK + 1, _BLOCK, torch.float32)
    waiting = [
        (tokens[:CONTEXT], num_prompt, greedy)
        for tokens, num_prompt, greedy in zip(training.written, training.prompts, training.greedy, strict=True)
        if len(tokens) > num_prompt + 2 and num_prompt + 2 < CONTEXT
    ]
    num_common = _num_common([tokens for tokens, *_ in waiting])
    texts: list[Text] = []
    total = len(waiting)
    model.taps = taps
    while waiting:
        group = []
        while waiting and sum(len(tokens) for tokens, *_ in group) < _READ_TOKENS:
            group.append(waiting.pop())
        parts = _streams([tokens for tokens, *_ in group], model, kv)
        texts += [
            Text(torch.tensor(tokens), num_prompt, num_common, greedy, part)
            for (tokens, num_prompt, greedy), part in zip(group, parts, strict=True)
        ]
        on_read(total - len(waiting), total)
    model.taps = ()
    return texts


def _streams(texts: list[list[int]], model: Llama, kv: KvCache) -> list[Tensor]:
    lengths = [len(tokens) for tokens in texts]
    ends = np.cumsum(lengths).tolist()
    position = torch.cat([torch.arange(length) for length in lengths])
    chunks = [Chunk(end - length, end, length, None, None) for end, length in zip(ends, lengths, strict=True)]
    every = torch.arange(ends[-1])
    plan = AttentionPlan(slot_mapping=every, groups=[], chunks=chunks)
    ids = torch.tensor([token for tokens in texts for token in tokens])
    model.hidden(Batch(ids, position, PlannedAttention(plan, position), every), kv)
    unit = torch.stack([F.rms_norm(x, x.shape[1:], eps=model.eps) for x in model.tapped], 1)
    return [part.clone() for part in unit.half().split(lengths)]


def _num_common(texts: list[list[int]]) -> int:
    """Tokens that several texts begin with; these are the template's."""
    if len(texts) < 2:
        return 0
    first, last = min(texts), max(texts)
    pairs = zip(first, last, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))


def lessons(texts: list[Text]) -> list[list[Text]]:
    """Groups of texts for a lesson each."""
    found: list[list[Text]] = [[]]
    for text in texts:
        if sum(len(each.tokens) for each in found[-1]) + len(text.tokens) > _BATCH_TOKENS and found[-1]:
            found.append([])
        found[-1].append(text)
    return found


def lesson(texts: list[Text]) -> Lesson:
    """The last position of a text has nothing to guess that is known."""
    lengths = [len(text.tokens) - 1 for text in texts]
    # Input position p guesses the token at p + 2. Only answers are served.
    counts = [torch.arange(length) >= text.num_prompt - 2 for text, length in zip(texts, lengths, strict=True)]
    return Lesson(
        torch.cat([text.streams[:-1] for text in texts]).float().transpose(0, 1),
        torch.cat([text.tokens[1:] for text in texts]),
        torch.cat([text.streams[1:, -1] for text in texts]).float(),
        torch.cat([torch.arange(length) for length in lengths]),
        lengths,
        torch.cat(counts),
    )
