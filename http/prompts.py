"""Prompts as completions and embeddings take them: texts or token ids, one or many, whole or cut to a length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipring.http import config as limits
from slipring.http.errors import ApiError, bad_request
from slipring.http.ranges import check_range
from slipring.http.served import ServedModel

TokenIds = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cut:
    """`truncate_prompt_tokens` and `truncation_side`."""

    length: int
    side: str
    """Where tokens are dropped: `left` or `right`."""

    def apply(self, token_ids: TokenIds) -> TokenIds:
        return token_ids[-self.length :] if self.side == "left" else token_ids[: self.length]


@dataclass(frozen=True, slots=True)
class Wanted:
    """How one API reads its prompts."""

    param: str
    """The field that holds them."""
    add_special_tokens: bool
    cut: Cut | None
    echo: bool = False
    n: int = 1


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: TokenIds
    echo: str = ""
    """Text that comes before what is generated."""


def cut_of(model: ServedModel, length: int | None, side: str | None, default_side: str, answer: int) -> Cut | None:
    """From the body's fields; None: nothing is cut. -1: to the context, less `answer` tokens or half of it.

    Raises ApiError.
    """
    if side not in (None, "left", "right"):
        raise bad_request('`truncation_side` must be "left" or "right".', "truncation_side")
    check_range("truncate_prompt_tokens", length)
    if length == 0:
        raise bad_request("`truncate_prompt_tokens` must be at least 1, or -1.", "truncate_prompt_tokens")
    if length is None:
        return None
    context = model.engine.max_model_len
    return Cut(context - min(answer, context // 2) if length < 0 else length, side or default_side)


async def read_prompts(model: ServedModel, value: Any, wanted: Wanted) -> list[Prompt]:
    """Raises ApiError (400) for anything that is no prompt."""
    if value is None:
        raise bad_request(f"Missing required field `{wanted.param}`.", wanted.param, "missing_required_parameter")
    if isinstance(value, str):
        return await _from_texts(model, wanted, [value])
    if not value:
        raise _wrong(wanted.param)
    if not isinstance(value[0], int):
        model.check_choices(len(value) * wanted.n)
    kinds = set(map(type, value))  # a prompt of 100,000 ids must not hold up the loop
    if kinds == {int}:
        return [_from_ids(model, wanted, value)]
    if len(value) > limits.MAX_PROMPTS:
        message = f"`{wanted.param}` may hold at most {limits.MAX_PROMPTS} prompts, got {len(value)}."
        raise bad_request(message, wanted.param)
    if kinds == {str}:
        return await _from_texts(model, wanted, [str(item) for item in value])
    if kinds == {list}:
        return [_from_ids(model, wanted, item) for item in value]
    raise _wrong(wanted.param)


async def _from_texts(model: ServedModel, wanted: Wanted, texts: list[str]) -> list[Prompt]:
    if wanted.cut is None:
        for text in texts:
            model.check_length(text, wanted.param)
    found = await model.engine.encode_many(texts, wanted.add_special_tokens)
    return [_prompt(model, wanted, ids, text) for ids, text in zip(found, texts, strict=True)]


def _from_ids(model: ServedModel, wanted: Wanted, token_ids: Any) -> Prompt:
    return _prompt(model, wanted, model.rules.check_ids(token_ids, wanted.param), None)


def _prompt(model: ServedModel, wanted: Wanted, token_ids: TokenIds, text: str | None) -> Prompt:
    whole = len(token_ids)
    if wanted.cut is not None:
        token_ids = wanted.cut.apply(token_ids)
    # Too long a prompt is refused later on; decoding it just to echo it would be wasted.
    if not wanted.echo or len(token_ids) > model.engine.max_model_len:
        return Prompt(token_ids)
    if text is None or len(token_ids) < whole:
        text = model.engine.tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=False)
    return Prompt(token_ids, text)


def _wrong(param: str) -> ApiError:
    return bad_request(
        f"`{param}` must be a string, a list of strings, a list of token ids or a list of lists of token ids, not "
        "empty and not mixed.",
        param,
        "invalid_type",
    )
