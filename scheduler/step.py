"""What goes out and comes back: a step in flight, and what a returned one taught."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipring.scheduler.request import FinishReason, Request
from slipring.shm.wire import StepFlag, StepInputView, StepOutputView, score_words


class ProtocolError(Exception):
    """A StepOutput that does not answer the oldest step in flight."""


@dataclass(slots=True)
class Step:
    """A step in flight: a summary for pacing, and the slot's view, which stays valid until the step is back."""

    step_id: int
    view: StepInputView
    num_rows: int
    num_decode: int
    num_chunk_tokens: int
    reporting: list[tuple[int, Request]]
    """(entry, request) of chunks that report something of their prompt, or end a request that draws nothing."""


class ChunkRoom:
    """What is left of a step for chunks of prompts: tokens to compute, and words of the output's report."""

    __slots__ = ("tokens", "words")

    def __init__(self, tokens: int, words: int) -> None:
        self.tokens = tokens
        self.words = words

    def allows(self, request: Request) -> bool:
        """Whether a chunk of it, however short, can go into the step."""
        params = request.params
        least = score_words(params.prompt_logprobs) if params.prompt_logprobs >= 0 else params.embedding_size
        return self.tokens > 0 and self.words >= least

    def take(self, request: Request, start: int, end: int) -> tuple[int, StepFlag]:
        """Positions of the request that are computed from `start` on, at most up to `end`, and their flags."""
        count = min(end - start, self.tokens)
        flags = StepFlag(0)
        to_score = request.num_prompt - 1 - start if request.params.prompt_logprobs >= 0 else 0
        if to_score > 0 and request.num_scored < request.num_prompt - 1:
            each = score_words(request.params.prompt_logprobs)
            if min(count, to_score) * each > self.words:
                count = self.words // each
            self.words -= min(count, to_score) * each
            flags |= StepFlag.SCORE
        if request.params.embedding_size and start + count == end:
            self.words -= request.params.embedding_size
            flags |= StepFlag.EMBED
        self.tokens -= count
        return count, flags


@dataclass(slots=True)
class Report:
    """What an entry reported of its request's prompt: log-probabilities, or a hidden state at the end."""

    request: Request
    entry: int
    num_known: int
    """Records at the beginning of the report that had come before: the request was preempted in between."""
    ended: FinishReason | None
    """The request draws nothing and is done, or failed."""

    def words(self, view: StepOutputView) -> NDArray[np.int32]:
        """What is new in it, a view of the slot."""
        params = self.request.params
        skipped = self.num_known * score_words(params.prompt_logprobs) if params.prompt_logprobs >= 0 else 0
        return view.report_of(self.entry)[skipped:]


@dataclass(slots=True)
class Returned:
    """What `update` learned: `tokens[i]` was drawn for `requests[i]`, at place `places[i]` of the output.

    A request's tokens of one step stand together, in order.
    """

    step: Step
    requests: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    finished: dict[int, tuple[FinishReason, int | None]] = field(default_factory=dict)
    """Index of a request's last token -> (why it ended, the token id that stopped it)."""
    reports: list[Report] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """Only ever grow."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    external_hits: int = 0
    """Those of them that a KV tier had, and not the device."""
    num_drafts: int = 0
    """Times that drafts were verified for a row."""
    num_draft_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    """Accepted drafts by how many were accepted before them."""

    def count_to(self, depth: int) -> None:
        """Accepted drafts are counted by place, at least up to this one."""
        self.num_accepted_per_position += [0] * (depth - len(self.num_accepted_per_position))
