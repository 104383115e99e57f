"""Log-probabilities in the two shapes OpenAI gives them: a list of objects (chat), parallel lists (completions).

JSON has no infinity: a probability of zero is written as -9999, as vLLM does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipring.runtime.request import TokenLogprob

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine

FLOOR = -9999.0


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > FLOOR else FLOOR


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

    def completion(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """`offset`: characters of the choice's text before the first of these tokens."""
        tokens = [self.text(e.token_id) for e in entries]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(e.logprob) for e in entries],
            "top_logprobs": [self._alternatives(e) for e in entries],
            "text_offset": offsets,
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
