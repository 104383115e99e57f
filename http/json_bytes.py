"""JSON of what a request held and an answer repeats, which may be more than orjson can write."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson


def json_bytes(value: Any) -> bytes:
    """As orjson writes it, but with integers of any size and objects as deep as bodies may be."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return msgspec.json.encode(value)
