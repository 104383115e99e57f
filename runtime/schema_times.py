"""JSON Schema's `time` and `date-time` formats, as patterns.

llguidance allows second 60 in every minute there, RFC 3339 only where a leap second can be (23:59:60 UTC), so that a
document could match the grammar and not its schema. What these patterns allow is always valid; they leave out leap
seconds, the 29th of February and years outside of 1000 to 2999.
"""

from __future__ import annotations

from typing import Any

_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DAYS = (
    r"(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])",
    r"(0[13-9]|1[0-2])-(29|30)",
    r"(0[13578]|1[02])-31",
)
_DATE = rf"[12][0-9]{{3}}-({'|'.join(_DAYS)})"
_PATTERNS = {"time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose content is data and no schema."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose content maps names to schemas, so that a name there is no keyword."""


def times_as_patterns(schema: Any) -> Any:
    """The same schema with these formats replaced by patterns; one that has a pattern besides keeps its format."""
    if isinstance(schema, list):
        return [times_as_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rewritten = {key: _keyword(key, value) for key, value in schema.items()}
    pattern = _PATTERNS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None and "pattern" not in schema:
        del rewritten["format"]
        rewritten["pattern"] = pattern
    return rewritten


def _keyword(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if key in _NAMED and isinstance(value, dict):
        return {name: times_as_patterns(schema) for name, schema in value.items()}
    return times_as_patterns(value)
