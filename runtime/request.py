"""What the outside hands to the engine, and what it gets back: `GenerationRequest` in, `Delta`s out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from slipring.shm.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, SamplingParams

__all__ = [
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
    "SamplingParams",
    "Sink",
    "TokenLogprob",
]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and how to continue it. `n` completions share the prompt; their deltas carry `index` 0..n-1."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    """`params.choice` is set by the engine for each of the n completions."""
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    priority: int = 0
    """Lower is sooner, with `--scheduling-policy priority`."""


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
    error: str | None = None
    """A sentence for people, with `finish_reason` `error`."""


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
