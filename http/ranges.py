"""Ranges of numeric fields and allowed words: the one table that requests are checked by and `/openapi.json` tells."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from slipring.http.config import MAX_CHOICES
from slipring.http.errors import bad_request
from slipring.runtime.request import MAX_LOGPROBS

_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Range:
    least: float
    most: float | None = None
    open_below: bool = False
    """`least` itself is not allowed."""

    def holds(self, value: float) -> bool:
        # Written so that NaN fails every comparison and is refused.
        above = value > self.least if self.open_below else value >= self.least
        return above and (self.most is None or value <= self.most) and (isinstance(value, int) or math.isfinite(value))

    def words(self) -> str:
        low = f"more than {self.least}" if self.open_below else f"at least {self.least}"
        return low if self.most is None else f"{low} and at most {self.most}"

    def keywords(self) -> dict[str, float]:
        """As JSON Schema."""
        low = "exclusiveMinimum" if self.open_below else "minimum"
        return {low: self.least} if self.most is None else {low: self.least, "maximum": self.most}


RANGES = {
    "n": Range(1, MAX_CHOICES),
    "best_of": Range(1, MAX_CHOICES),
    "truncate_prompt_tokens": Range(-1),
    "dimensions": Range(1),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, open_below=True),
    "top_k": Range(-1),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    # Outside these the penalty overflows or vanishes in float32.
    "repetition_penalty": Range(0.01, 100),
    "seed": Range(-_INT64, _INT64 - 1),
    "priority": Range(-(1 << 31), (1 << 31) - 1),
    "min_tokens": Range(0),
    "max_tokens": Range(0),
    "max_completion_tokens": Range(1),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
    "top_logprobs": Range(0, MAX_LOGPROBS),
    "max_offload_tokens": Range(0),
    "max_load_tokens": Range(0),
}
"""By field, in whatever body it stands."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

KEYWORDS: dict[tuple[str, str], dict[str, Any]] = {
    ("ChatBody", "messages"): {"minItems": 1},
    ("Message", "role"): {"enum": list(ROLES)},
}
"""JSON Schema of (struct, field), beside the type."""


def check_range(param: str, value: float | None, limits: Range | None = None) -> None:
    """Raises ApiError (400). `limits` instead of the field's own in the table."""
    limits = limits or RANGES[param]
    if value is None or limits.holds(value):
        return
    shown = value if abs(value) < 2 * _INT64 else "a number out of range"
    raise bad_request(f"`{param}` must be {limits.words()}, got {shown}.", param, "invalid_value")
