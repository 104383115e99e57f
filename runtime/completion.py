"""One completion of a request: turns its drawn tokens into text, and hands each piece to the sink.

Owns the detokenizer and the clock readings of one completion. The scheduler's `Request` points here through `owner`.
"""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipring.runtime.detokenizer import Detokenizer
from slipring.runtime.metrics import Metrics, Timing
from slipring.runtime.prompt_logprobs import PromptLogprobs
from slipring.runtime.request import Delta, GenerationRequest, Sink, TokenLogprob
from slipring.scheduler.request import FinishReason, Request
from slipring.shm.grammar import LIMITS
from slipring.shm.wire import NO_MATCH, NO_TOKEN, NON_FINITE, score_words

if TYPE_CHECKING:
    from slipring.runtime.replica import Replica

logger = logging.getLogger(__name__)

NO_NUMBERS = "the model's output was not finite for this request"
ALL_BARRED = (
    "what this request allows (its grammar, allowed_token_ids, bad_words, min_tokens) left no token to draw: allow more"
)
TOO_COMPLEX = (
    "the grammar that this request asks for became too complex to be followed: one token met a limit on the parser's "
    f"items ({LIMITS['step_max_items']}, {LIMITS['max_items_in_row']} in a row), the lexer's work "
    f"({LIMITS['step_lexer_fuel']}) or its states ({LIMITS['max_lexer_states']}); fewer alternatives that begin alike, "
    "and shorter repetitions, need less"
)
FAILURES = {NON_FINITE: NO_NUMBERS, NO_MATCH: TOO_COMPLEX, NO_TOKEN: ALL_BARRED}


class Completion:
    __slots__ = (
        "_include_stop",
        "_own_stop_ids",
        "_scores",
        "_sink",
        "arrival",
        "detokenizer",
        "finished",
        "first_token_at",
        "generation",
        "index",
        "last_token_at",
        "metrics",
        "moved_at",
        "replica",
        "request",
        "request_id",
        "scheduled_at",
        "token_ids",
        "wants_logprobs",
    )

    def __init__(
        self,
        generation: GenerationRequest,
        index: int,
        request: Request,
        detokenizer: Detokenizer,
        eos_token_ids: frozenset[int],
        sink: Sink,
        metrics: Metrics,
    ) -> None:
        """`metrics`: where it counts until it has a replica."""
        self.request_id = generation.request_id
        self.generation = generation
        self.index = index
        self.request = request
        self.detokenizer = detokenizer
        self.arrival = request.arrival
        self.scheduled_at = self.first_token_at = self.last_token_at = 0.0
        self.finished = False
        self.token_ids = array("i")
        """Every token that was pushed, whether its text is held back or not."""
        self.replica: Replica | None = None
        """Who computes it, once that is decided (`place`)."""
        self.moved_at = -1
        """Tokens that it had when it last went on with another replica, because a worker had broken while it was in
        flight; -1: it never did."""
        self.wants_logprobs = request.params.logprobs >= 0
        self._scores: list[NDArray[np.int32]] | None = [] if request.params.prompt_logprobs >= 0 else None
        """What has come of the prompt's log-probabilities, until the first delta takes it along."""
        self._include_stop = generation.include_stop_str_in_output
        self._own_stop_ids = request.stop_token_ids - eos_token_ids
        self._sink = sink
        self.metrics = metrics
        request.owner = self

    def place(self, replica: Replica) -> None:
        """This one computes it, and counts it, from now on."""
        self.replica = replica
        self.metrics = replica.metrics

    def push(
        self,
        token: int,
        logprobs: tuple[TokenLogprob] | None,
        finish: FinishReason | None,
        stop_token: int | None,
        now: float,
    ) -> bool:
        """Take one token. True when its text completed a stop string, so that the caller must end the request."""
        self._observe(now)
        self.token_ids.append(token)
        if stop_token is not None:
            text = self.detokenizer.push(token) if self._include_stop and token in self._own_stop_ids else ""
        else:
            text = self.detokenizer.push(token)
        stopped = self.detokenizer.stopped
        if finish is None and stopped is None:
            self._emit(
                Delta(
                    index=self.index,
                    text=text,
                    token_ids=(token,),
                    logprobs=logprobs,
                    num_cached_tokens=self.request.num_cached_tokens,
                )
            )
            return False
        self.finish(
            FinishReason.STOP if stopped is not None else finish or FinishReason.STOP,
            now,
            text=text,
            token_ids=(token,),
            logprobs=logprobs,
            stop_reason=stopped if stopped is not None else stop_token if stop_token in self._own_stop_ids else None,
        )
        return stopped is not None

    @property
    def num_scored(self) -> int:
        """Positions of the prompt whose log-probabilities have come; all, once they have gone out."""
        if self._scores is None:
            return self.request.num_prompt
        return sum(map(len, self._scores)) // score_words(self.request.params.prompt_logprobs)

    def take_report(self, words: NDArray[np.int32], ended: FinishReason | None, now: float) -> None:
        """What the worker reports of the prompt, a view of the slot; `ended`: and that was all."""
        if self._scores is not None:
            self._scores.append(words.copy())
        if ended is FinishReason.ERROR:
            self.finish(ended, now, error=NO_NUMBERS)
        elif ended is not None:
            wanted = self.request.params.embedding_size
            self.finish(ended, now, embedding=words.view(np.float32).copy() if wanted else None)

    def finish(
        self,
        reason: FinishReason,
        now: float,
        *,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob] | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
        error_param: str | None = None,
        embedding: NDArray[np.float32] | None = None,
    ) -> None:
        """Hand over the last piece: what was held back, and why it ends. Only the first call counts."""
        if self.finished:
            return
        self.finished = True
        text += self.detokenizer.finish()
        if self.detokenizer.stopped is not None and error is None:
            reason, stop_reason = FinishReason.STOP, self.detokenizer.stopped
        timing = Timing(self.arrival, self.scheduled_at, self.first_token_at, self.last_token_at)
        self._count_end(reason, timing, now)
        self._emit(
            Delta(
                index=self.index,
                text=text,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=reason.value,
                stop_reason=stop_reason,
                num_cached_tokens=self.request.num_cached_tokens,
                embedding=embedding,
                error=error,
                error_param=error_param,
                timing=timing,
            )
        )

    def fail(self, code: int, now: float) -> None:
        """A draw came to nothing: NON_FINITE, which is the model's fault, NO_MATCH or NO_TOKEN."""
        param = None
        if code == NO_MATCH:
            param = self.generation.grammar_param
        elif code == NO_TOKEN:
            param = self._restriction()
        self.finish(FinishReason.ERROR, now, error=FAILURES[code], error_param=param)

    def _restriction(self) -> str | None:
        """The field that left no token to draw, or the one of several that is the easiest to change."""
        params = self.generation.params
        if params.allowed_token_ids:
            return "allowed_token_ids"
        return "bad_words" if params.bad_words else self.generation.grammar_param

    def _count_end(self, reason: FinishReason, timing: Timing, now: float) -> None:
        metrics, request = self.metrics, self.request
        metrics.finished[reason.value] += 1
        metrics.requests.observe(timing, now, len(self.token_ids))
        metrics.requests.preemptions.observe(request.num_preemptions)
        if self.index == 0:  # these belong to the request, not to each of its completions
            metrics.requests.prompt_tokens.observe(request.num_prompt)
            metrics.requests.max_tokens.observe(request.params.max_tokens)
            metrics.requests.n.observe(self.generation.n)

    def _observe(self, now: float) -> None:
        metrics = self.metrics
        metrics.generation_tokens += 1
        if self.last_token_at:
            metrics.itl_s.observe(now - self.last_token_at)
        else:
            metrics.ttft_s.observe(now - self.arrival)
            self.first_token_at = now
        self.last_token_at = now

    def _emit(self, delta: Delta) -> None:
        """A sink that raises loses its own stream's piece, never anybody else's."""
        if self._scores is not None:
            delta.prompt_logprobs = PromptLogprobs(self._scores, self.request.params.prompt_logprobs)
            self._scores = None
        try:
            self._sink(delta)
        except Exception:
            logger.exception("the sink of request %s raised", self.request_id)
