"""What the outside hands to the engine, and what it gets back: `GenerationRequest` in, `Delta`s out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipring.runtime.metrics import Timing
from slipring.scheduler.request import TierLimits
from slipring.shm.grammar import Grammar
from slipring.shm.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from slipring.shm.spec import SamplingDefaults
from slipring.shm.table import flatten_words

if TYPE_CHECKING:
    from slipring.runtime.prompt_logprobs import PromptLogprobs

__all__ = [
    "MAX_ALLOWED_TOKEN_IDS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_STOP_TOKEN_IDS",
    "ContextLengthError",
    "Delta",
    "EngineDeadError",
    "EngineError",
    "GenerationRequest",
    "InvalidRequestError",
    "QueueFullError",
    "SamplingDefaults",
    "SamplingParams",
    "Sink",
    "TierLimits",
    "Timing",
    "TokenLogprob",
    "check_request",
]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and how to continue it. `n` completions share the prompt; their deltas carry `index` 0..n-1."""

    request_id: str
    prompt_token_ids: Sequence[int] | NDArray[np.int64]
    params: SamplingParams
    """`params.choice` is set by the engine for each of the n completions."""
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    tier_limits: TierLimits = TierLimits()
    priority: int = 0
    """Lower is sooner, with `--scheduling-policy priority`."""
    grammar: Grammar | None = None
    """What the output must match, from `Engine.compile_grammar`."""
    grammar_param: str | None = None
    """The client's field that asked for it, for errors."""
    data_parallel_rank: int | None = None
    """The replica that must take it; None: the router chooses."""
    session: str | None = None
    """Requests of a session would like the same replica; a hint."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability under the model's raw distribution (before bias, penalties and temperature)."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely tokens, best first; length as asked for."""


class Delta(msgspec.Struct, kw_only=True):
    """One piece of one completion, handed to the sink. The last one of a completion has `finish_reason`."""

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    """Tokens drawn since the previous delta, the ending one included; their text may still be held back."""
    logprobs: Sequence[TokenLogprob] | None = None
    """One for each of `token_ids`, when asked for."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that matched; None for end of sequence."""
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache (valid in the first delta and in the last)."""
    prompt_logprobs: PromptLogprobs | None = None
    """In a completion's first delta, when asked for."""
    embedding: NDArray[np.float32] | None = None
    """The prompt's last hidden state behind the final norm, when asked for; not normalised to a length."""
    error: str | None = None
    """A sentence for people, with `finish_reason` `error`."""
    error_param: str | None = None
    """The request's field whose fault it is, so that trying again is no use. None: the engine's."""
    timing: Timing | None = None
    """In the last delta of a completion."""


Sink = Callable[[Delta], None]
"""Called synchronously on the loop. Must not block and must not raise."""


class EngineError(Exception):
    """Base of what `Engine.submit` raises."""


class InvalidRequestError(EngineError):
    """The request can never be served as it stands (HTTP 400)."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit the context (code `context_length_exceeded`)."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")


class QueueFullError(EngineError):
    """Too much is waiting already (HTTP 429); try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(EngineError):
    """The engine cannot serve any more, or not yet (HTTP 503)."""


def check_request(generation: GenerationRequest, vocab_size: int) -> None:
    """What every caller must keep to, whatever its own checks. Raises InvalidRequestError, naming the field.

    A parameter that slipped through would be found in the middle of a step, where it is everybody's problem.
    """
    params = generation.params
    bias_ids = [token for token, _ in params.logit_bias]
    allowed, bad_words = params.allowed_token_ids, params.bad_words
    numbers = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        *(bias for _, bias in params.logit_bias),
    )
    for param, good, words in (
        ("n", generation.n >= 1, "must be at least 1"),
        ("priority", abs(generation.priority) < 1 << 31, "must be a 32-bit integer"),
        ("stop", all(generation.stop), "must not contain an empty string"),
        ("max_tokens", params.max_tokens >= 0, "must be 0 or more"),
        ("max_tokens", params.max_tokens == 0 or not params.embedding_size, "must be 0 for an embedding"),
        ("min_tokens", 0 <= params.min_tokens < 1 << 31, "must be a 32-bit integer, 0 or more"),
        ("seed", 0 <= params.seed < 1 << 64, "must fit 64 bits, unsigned"),
        ("top_k", 0 <= params.top_k < 1 << 31, "must be 0 (off) or more"),
        ("logprobs", -1 <= params.logprobs <= MAX_LOGPROBS, f"must be from 0 to {MAX_LOGPROBS}"),
        ("prompt_logprobs", -1 <= params.prompt_logprobs <= MAX_LOGPROBS, f"must be from 0 to {MAX_LOGPROBS}"),
        ("sampling", all(map(math.isfinite, numbers)), "must hold finite numbers only"),
        ("repetition_penalty", params.repetition_penalty > 0, "must be above 0"),
        ("stop_token_ids", len(params.stop_token_ids) <= MAX_STOP_TOKEN_IDS, f"may hold {MAX_STOP_TOKEN_IDS} ids"),
        ("stop_token_ids", _in_vocabulary(params.stop_token_ids, vocab_size), f"must be below {vocab_size}"),
        ("logit_bias", len(bias_ids) <= MAX_LOGIT_BIAS, f"may hold {MAX_LOGIT_BIAS} tokens"),
        ("logit_bias", _in_vocabulary(bias_ids, vocab_size), f"must name tokens below {vocab_size}"),
        ("allowed_token_ids", len(allowed) <= MAX_ALLOWED_TOKEN_IDS, f"may hold {MAX_ALLOWED_TOKEN_IDS} ids"),
        ("allowed_token_ids", _in_vocabulary(allowed, vocab_size), f"must be below {vocab_size}"),
        ("bad_words", len(flatten_words(bad_words)) <= MAX_BAD_WORD_TOKENS, f"may have {MAX_BAD_WORD_TOKENS} tokens"),
        ("bad_words", all(word and _in_vocabulary(word, vocab_size) for word in bad_words), "must hold tokens"),
    ):
        if not good:
            raise InvalidRequestError(f"`{param}` {words}", param)


def _in_vocabulary(token_ids: Sequence[int], vocab_size: int) -> bool:
    return all(0 <= token < vocab_size for token in token_ids)
