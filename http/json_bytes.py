"""JSON of what a request held and an answer repeats, which may be more than orjson can write."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson


def json_bytes(value: Any) -> bytes:
    """As orjson writes it, but with integers of any size. No body is too deep for it (`body_depth.py`)."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return msgspec.json.encode(value)
