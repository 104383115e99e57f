"""What goes out and comes back: a step in flight, and what a returned one taught."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipring.scheduler.request import FinishReason, Request
from slipring.shm.wire import StepInputView


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


@dataclass(slots=True)
class Counters:
    """Only ever grow."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    num_drafts: int = 0
    """Times that drafts were verified for a row."""
    num_draft_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)
    """Accepted drafts by their place in the chain."""
