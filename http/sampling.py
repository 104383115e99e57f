"""From a body's sampling fields to `SamplingParams`: every field is checked here (by the ranges of `ranges.py`), and
nowhere else.

Defaults come from the request, then from what the model's authors recommend, then from OpenAI's documentation
(temperature 1, top_p 1). Fields that are known but not supported are refused by name, never ignored.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipring.http import config as limits
from slipring.http.bodies import SamplingBody
from slipring.http.errors import ApiError, bad_request
from slipring.http.ranges import RANGES, Range, check_range
from slipring.http.remote_kv import kv_source
from slipring.runtime.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingDefaults,
    SamplingParams,
    TierLimits,
)

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine

logger = logging.getLogger(__name__)

_BIAS = Range(-100, 100)
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that a request and a model's recommendation share."""
_RANGED = ("presence_penalty", "frequency_penalty", "seed", "priority", "min_tokens", "prompt_logprobs")
_UNSUPPORTED = ("use_beam_search", "early_stopping", "logits_processors", "prompt_embeds")


class SamplingRules:
    """Checks bodies against one model. Raises ApiError (400) naming the first bad field."""

    def __init__(self, engine: Engine) -> None:
        self._defaults = _usable(engine.spec.sampling_defaults)
        self._eos = engine.spec.eos_token_ids
        self._vocab_size = engine.spec.vocab_size

    def params(self, body: SamplingBody, max_tokens: int, seed: int) -> SamplingParams:
        """What follows from the body alone; `max_tokens` is already cut to the context, `seed` already drawn."""
        defaults = self._defaults
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_first(body.temperature, defaults.temperature, 1.0),
            top_p=_first(body.top_p, defaults.top_p, 1.0),
            top_k=min(max(0, _first(body.top_k, defaults.top_k, 0)), self._vocab_size),
            min_p=_first(body.min_p, defaults.min_p, 0.0),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
            seed=seed % (1 << 64),
            # A request may ask for more than fits: then min_tokens holds for what there is room for.
            min_tokens=min(body.min_tokens or 0, max_tokens),
            stop_token_ids=self._stop_token_ids(body),
            logit_bias=self._logit_bias(body.logit_bias or {}),
            allowed_token_ids=self._allowed_token_ids(body),
        )

    def check(self, body: SamplingBody) -> None:
        """Everything that can be said before the prompt is looked at."""
        _refuse_unsupported(body)
        for name in ("n", "best_of", *_RECOMMENDED, *_RANGED):
            check_range(name, getattr(body, name))
        _check_best_of(body)
        _check_stream_options(body)
        stop_strings(body)
        self._logit_bias(body.logit_bias or {})
        self._stop_token_ids(body)
        self._allowed_token_ids(body)
        _check_bad_words(body)
        check_salt(body.cache_salt)
        tier_limits(body)

    def _stop_token_ids(self, body: SamplingBody) -> tuple[int, ...]:
        ids = body.stop_token_ids or []
        eos = () if body.ignore_eos else self._eos
        most = MAX_STOP_TOKEN_IDS - len(self._eos)
        if len(ids) > most:
            raise bad_request(f"`stop_token_ids` may hold at most {most} ids, got {len(ids)}.", "stop_token_ids")
        self.check_ids(ids, "stop_token_ids")
        return tuple(dict.fromkeys((*ids, *eos)))

    def _allowed_token_ids(self, body: SamplingBody) -> tuple[int, ...]:
        ids = body.allowed_token_ids or []
        if len(ids) > MAX_ALLOWED_TOKEN_IDS:
            message = f"`allowed_token_ids` may hold at most {MAX_ALLOWED_TOKEN_IDS} ids, got {len(ids)}."
            raise bad_request(message, "allowed_token_ids")
        self.check_ids(ids, "allowed_token_ids")
        return tuple(dict.fromkeys(ids))

    def _logit_bias(self, bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
        if len(bias) > MAX_LOGIT_BIAS:
            message = f"`logit_bias` may hold at most {MAX_LOGIT_BIAS} tokens, got {len(bias)}."
            raise bad_request(message, "logit_bias")
        last = self._vocab_size - 1
        entries = []
        for key, value in bias.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) <= last):
                message = f"`logit_bias` maps token ids (0 to {last}) to numbers; {key[:40]!r} is no such id."
                raise bad_request(message, "logit_bias")
            check_range("logit_bias", value, _BIAS)
            entries.append((int(key), value))
        return tuple(entries)

    def check_ids(self, ids: list[int], param: str) -> NDArray[np.int64]:
        """Token ids given by a client must exist: an id outside the vocabulary would index other rows' memory."""
        try:
            found = np.asarray(ids, np.int64)
        except OverflowError:
            raise self._no_token("a number out of range", param) from None
        if len(found) and not (found.min() >= 0 and found.max() < self._vocab_size):
            bad = found[(found < 0) | (found >= self._vocab_size)][0]
            raise self._no_token(str(bad), param)
        return found

    def _no_token(self, shown: str, param: str) -> ApiError:
        return bad_request(
            f"`{param}` holds {shown}, which is no token id: they run from 0 to {self._vocab_size - 1}.", param
        )


def _usable(defaults: SamplingDefaults) -> SamplingDefaults:
    """Files in the wild recommend NaN and the like; such a value would make every request fail."""
    for name in defaults.__struct_fields__:
        alone = type(defaults)(**{name: getattr(defaults, name)})
        try:
            check_range(name, getattr(alone, name))
        except ApiError as error:
            logger.warning("the model recommends a value that cannot be used, so it is ignored: %s", error)
            defaults = msgspec.structs.replace(defaults, **{name: None})
    return defaults


def stop_strings(body: SamplingBody) -> tuple[str, ...]:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > limits.MAX_STOP_STRINGS:
        raise bad_request(f"`stop` may hold at most {limits.MAX_STOP_STRINGS} strings, got {len(stops)}.", "stop")
    for stop in stops:
        if not stop:
            raise bad_request("`stop` must not hold an empty string.", "stop")
        if len(stop.encode()) > limits.MAX_STOP_BYTES:
            raise bad_request(f"Each string of `stop` may have at most {limits.MAX_STOP_BYTES} bytes.", "stop")
    return tuple(stops)


def check_salt(salt: str | None) -> None:
    if salt is not None and not 1 <= len(salt) <= limits.MAX_STOP_BYTES:
        raise bad_request(f"`cache_salt` must have 1 to {limits.MAX_STOP_BYTES} characters.", "cache_salt")


def tier_limits(body: SamplingBody) -> TierLimits:
    params = body.kv_transfer_params
    if params is None:
        return TierLimits()
    for name in ("max_offload_tokens", "max_load_tokens"):
        check_range(f"kv_transfer_params.{name}", getattr(params, name), RANGES[name])
    return TierLimits(
        max_load_tokens=params.max_load_tokens, max_store_tokens=params.max_offload_tokens, source=kv_source(params)
    )


def check_logprobs(value: int | None, param: str) -> None:
    check_range(param, value)


def check_max_tokens(value: int | None, param: str, least: int = 1) -> None:
    check_range(param, value, Range(least))


def check_min_tokens(body: SamplingBody, max_tokens: int | None) -> None:
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise bad_request(f"`min_tokens` must be at most `max_tokens` ({max_tokens}).", "min_tokens")


def is_set(value: Any) -> bool:
    """False for null and for the blanks that form-filling clients send."""
    return value is not None and value is not False and value not in ("", [], {})


def _refuse_unsupported(body: SamplingBody) -> None:
    for name in _UNSUPPORTED:
        if is_set(getattr(body, name, None)):
            raise bad_request(f"`{name}` is not supported yet; leave it out.", name, "unsupported_parameter")
    if body.length_penalty is not None and body.length_penalty != 1:
        message = "`length_penalty` belongs to beam search, which is not supported; leave it out."
        raise bad_request(message, "length_penalty", "unsupported_parameter")


def _check_best_of(body: SamplingBody) -> None:
    n = body.n or 1
    if body.best_of is None or body.best_of == n:
        return
    if body.best_of < n:
        raise bad_request(f"`best_of` must be at least `n` ({n}), got {body.best_of}.", "best_of")
    if body.stream:
        raise bad_request("`best_of` above `n` cannot be streamed: the best are only known at the end.", "best_of")


def _check_bad_words(body: SamplingBody) -> None:
    words = body.bad_words or []
    if len(words) > limits.MAX_BAD_WORDS:
        raise bad_request(f"`bad_words` may hold at most {limits.MAX_BAD_WORDS} words, got {len(words)}.", "bad_words")
    for word in words:
        if not word.strip():
            raise bad_request("`bad_words` must not hold an empty word.", "bad_words")
        if len(word.encode("utf-8", "replace")) > limits.MAX_STOP_BYTES:
            raise bad_request(f"Each of `bad_words` may have at most {limits.MAX_STOP_BYTES} bytes.", "bad_words")


def _check_stream_options(body: SamplingBody) -> None:
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("`prompt_logprobs` cannot be streamed.", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise bad_request("`stream_options` is only allowed together with `stream: true`.", "stream_options")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
