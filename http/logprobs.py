"""Log-probabilities in the two shapes OpenAI gives them: a list of objects (chat), parallel lists (completions).

JSON has no infinity: a probability of zero is written as -9999, as vLLM does.
"""

from __future__ import annotations

import math
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slipring.runtime.request import TokenLogprob

if TYPE_CHECKING:
    from slipring.runtime.prompt_logprobs import PromptLogprobs
    from slipring.runtime.tokenizer import Tokenizer

FLOOR = -9999.0

TokenIds = Sequence[int] | NDArray[np.int64]


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
    """Names tokens for one model, by their text or (`by_id`) as `token_id:N`, which tells all of them apart.

    Their bytes are what they add to the text: none where special tokens are skipped, so that the bytes of all tokens
    are those of the text.
    """

    def __init__(self, tokenizer: Tokenizer, by_id: bool = False, skips_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._by_id = by_id
        self._added = tokenizer.byte_table(skips_special_tokens)

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_id else self._tokenizer.token_text(token_id)

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
            "text_offset": [offset.take(self._added[e.token_id]) for e in entries],
        }

    def echoed(self, token_ids: TokenIds, echo: str, scores: PromptLogprobs, num_top: int) -> dict[str, list[Any]]:
        """As `completion`, for a prompt that is echoed as the text `echo`; its first token follows nothing."""
        entries = scores.entries(token_ids, num_top)
        ids = np.asarray(token_ids).tolist()
        texts = [self._tokenizer.token_bytes(token_id) for token_id in ids]
        # Tokens that the tokenizer put in front are in no text.
        offset = TextOffset(len(echo) - len(b"".join(texts).decode("utf-8", "replace")))
        return {
            "tokens": [self.text(token_id) for token_id in ids],
            "token_logprobs": [None, *(finite(e.logprob) for e in entries)],
            "top_logprobs": [None, *(self._alternatives(e) for e in entries)],
            "text_offset": [max(0, offset.take(text)) for text in texts],
        }

    def prompt(self, token_ids: TokenIds, scores: PromptLogprobs, num_top: int) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token an object by token id, itself first; null for the first."""
        return [None, *(self._by_token(entry) for entry in scores.entries(token_ids, num_top))]

    def _by_token(self, entry: TokenLogprob) -> dict[str, Any]:
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
        found: dict[str, Any] = {}
        for token_id, logprob, rank in ranked:
            named = {"logprob": finite(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(token_id)}
            found.setdefault(str(token_id), named)
        return found

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token_id), "logprob": finite(logprob), "bytes": list(self._added[token_id])}

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        """Keyed by text; where two ids share one text the likelier keeps it. The drawn token is always among them."""
        named: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            named.setdefault(self.text(token_id), finite(logprob))
        return named
