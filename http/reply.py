"""What every answer of chat and completions carries (`ReplyHead`, `Usage`), and the answer that is not streamed.

A `Collector` is the non-streaming counterpart of `stream.FrameStream`: the same sink, gathered until every choice
has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipring.http.bodies import SamplingBody
from slipring.http.errors import ApiError, answer_failed
from slipring.runtime.prompt_logprobs import PromptLogprobs
from slipring.runtime.request import Delta, Timing, TokenLogprob


@dataclass(frozen=True, slots=True)
class ReplyHead:
    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


class Usage:
    """Token counts of one HTTP request: every prompt once, every generated token of every choice."""

    def __init__(self, prompt_lengths: list[int], choices_per_prompt: int) -> None:
        self.num_prompt = sum(prompt_lengths)
        self.num_generated = 0
        self._per_prompt = choices_per_prompt
        self._cached = [0] * len(prompt_lengths)
        self._reasoning: dict[int, int] = {}
        self.finish_reasons: list[str] = []
        """Of the choices that have ended, in the order in which they did."""
        self.timings: list[Timing] = []
        """Likewise."""

    def add(self, delta: Delta) -> None:
        self.num_generated += len(delta.token_ids)
        if delta.num_cached_tokens and delta.index % self._per_prompt == 0:
            # Of a prompt's choices the first counts: the others share what it has just computed.
            prompt = delta.index // self._per_prompt
            self._cached[prompt] = max(self._cached[prompt], delta.num_cached_tokens)
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
            if delta.timing is not None:
                self.timings.append(delta.timing)

    @property
    def num_cached(self) -> int:
        return sum(self._cached)

    @property
    def num_reasoning(self) -> int:
        return sum(self._reasoning.values())

    def set_reasoning(self, index: int, num_tokens: int) -> None:
        """So many of a choice's tokens are reasoning."""
        self._reasoning[index] = num_tokens

    def fields(self) -> dict[str, Any]:
        fields = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": self.num_prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        if self._reasoning:
            fields["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return fields


@dataclass(frozen=True, slots=True)
class Work:
    """What the engine does for one answer, for those who tell of it afterwards."""

    head: ReplyHead
    body: SamplingBody
    max_tokens: int | None
    usage: Usage


@dataclass(slots=True)
class Choice:
    """One finished completion."""

    echo: str = ""
    """Text that comes before what was generated."""
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Tokens of each piece."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embedding: NDArray[np.float32] | None = None

    @property
    def mean_logprob(self) -> float:
        """By token, under the model's raw distribution; needs `logprobs`."""
        return sum(entry.logprob for entry in self.logprobs) / max(1, len(self.logprobs))

    @property
    def text(self) -> str:
        return self.echo + self.generated

    @property
    def generated(self) -> str:
        return "".join(self.pieces)


class Collector:
    """Gathers the deltas of an answer that is sent at once."""

    def __init__(self, echo: list[str], usage: Usage) -> None:
        self.choices = [Choice(echo=text) for text in echo]
        self.usage = usage
        self.on_end: Callable[[], object] | None = None
        self._num_open = len(echo)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def push(self, delta: Delta) -> None:
        """The engine's sink."""
        if self._done.done():
            return
        if delta.finish_reason == "error":
            self.fail(answer_failed(delta.error, delta.error_param))
            return
        self.usage.add(delta)
        choice = self.choices[delta.index]
        choice.pieces.append(delta.text)
        choice.token_ids.extend(delta.token_ids)
        choice.sizes.append(len(delta.token_ids))
        choice.logprobs.extend(delta.logprobs or ())
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            choice.embedding = delta.embedding
            self._num_open -= 1
            if self._num_open == 0:
                self._end()
                self._done.set_result(None)

    def fail(self, error: ApiError) -> None:
        if not self._done.done():
            self._end()
            self._done.set_exception(error)
            self._done.exception()  # the waiting handler may be gone: nobody need retrieve it

    async def wait(self) -> list[Choice]:
        """Raises ApiError when the engine failed."""
        await self._done
        return self.choices

    def _end(self) -> None:
        on_end, self.on_end = self.on_end, None  # it may hold us: no cycle is left for the collector
        if on_end is not None:
            on_end()
