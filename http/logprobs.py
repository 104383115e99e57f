"""Log-probabilities in the two shapes OpenAI gives them: a list of objects (chat), parallel lists (completions).

JSON has no infinity: a probability of zero is written as -9999, as vLLM does.
"""

from __future__ import annotations

import math
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipring.runtime.request import TokenLogprob

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine

FLOOR = -9999.0


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > FLOOR else FLOOR


class TextOffset:
    """Where in a choice's text the next token begins, in characters; one may be made of several tokens."""

    __slots__ = ("_pending", "count")

    def __init__(self, count: int) -> None:
        """`count`: characters before the first token."""
        self.count = count
        self._pending = b""

    def take(self, data: bytes) -> int:
        """The offset of a token with these bytes."""
        begin, data = self.count, self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        self.count += len(text)
        return begin


class LogprobWriter:
    """Names tokens for one model."""

    def __init__(self, engine: Engine) -> None:
        self._tokenizer = engine.tokenizer

    def text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [
            {**self._named(e.token_id, e.logprob), "top_logprobs": [self._named(*top) for top in e.top]}
            for e in entries
        ]
        return {"content": content, "refusal": None}

    def completion(self, entries: Sequence[TokenLogprob], offset: TextOffset) -> dict[str, Any]:
        """`offset`: of the first of these tokens; is moved on behind them."""
        return {
            "tokens": [self.text(e.token_id) for e in entries],
            "token_logprobs": [finite(e.logprob) for e in entries],
            "top_logprobs": [self._alternatives(e) for e in entries],
            "text_offset": [offset.take(self._tokenizer.token_bytes(e.token_id)) for e in entries],
        }

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = list(self._tokenizer.token_bytes(token_id))
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": data}

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """Keyed by text; where two ids share one text the likelier keeps it. The drawn token is always among them."""
        named: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            named.setdefault(self.text(token_id), finite(logprob))
        return named
