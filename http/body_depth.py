"""How deep a body may be nested: below what any reader or writer of JSON here can do, orjson's 254 above all."""

from __future__ import annotations

import msgspec
import numpy as np

from slipring.http.errors import bad_request

MAX_DEPTH = 200
_KEPT = b'[]{}"'
_DROPPED = bytes(set(range(256)) - set(_KEPT))
_STEPS = bytes.maketrans(_KEPT, b"\x01\xff\x01\xff\x00")
"""What each byte adds to the depth, as int8; 0 for a quotation mark."""


def check_depth(data: bytes) -> None:
    """Raises ApiError (400), which names the field, for JSON that is more than `MAX_DEPTH` deep. Says nothing of what
    is no JSON."""
    if not _is_too_deep(data, MAX_DEPTH):
        return
    field = _deep_field(data)
    where = "The body" if field is None else f"`{field}`"
    raise bad_request(
        f"{where} is nested too deeply: a body may be {MAX_DEPTH} arrays and objects deep.", field, "nested_too_deeply"
    )


def _is_too_deep(data: bytes, most: int) -> bool:
    if data.count(b"[") + data.count(b"{") <= most:
        return False
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quotation mark begins or ends a string
    steps = np.frombuffer(plain.translate(_STEPS, _DROPPED), np.int8)
    in_string = np.bitwise_xor.accumulate(steps == 0)
    return bool(np.cumsum(np.where(in_string, 0, steps), dtype=np.int32).max(initial=0) > most)


def _deep_field(data: bytes) -> str | None:
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None  # so deep that nobody can tell
    return next((name for name, value in fields.items() if _is_too_deep(bytes(value), MAX_DEPTH - 1)), None)
