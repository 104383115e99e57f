"""Part of a list of items, as the query string of GET /v1/responses/{id}/input_items asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from slipring.http.errors import bad_request
from slipring.http.responses_bodies import Item, Part

MAX_LIMIT = 100
DEFAULT_LIMIT = 20


@dataclass(frozen=True, slots=True)
class Page:
    """Which items of a list are asked for."""

    newest_first: bool = True
    limit: int = DEFAULT_LIMIT
    after: str | None = None

    @classmethod
    def parse(cls, query: str) -> Page:
        """From a query string. Raises ApiError (400)."""
        asked = dict(parse_qsl(query))
        order, limit = asked.get("order", "desc"), asked.get("limit", str(DEFAULT_LIMIT))
        if order not in ("asc", "desc"):
            raise bad_request('`order` must be "asc" or "desc".', "order")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LIMIT):
            raise bad_request(f"`limit` must be at least 1 and at most {MAX_LIMIT}.", "limit")
        return cls(order == "desc", int(limit), asked.get("after"))

    def of(self, items: list[Item]) -> dict[str, Any]:
        """Raises ApiError (400) when `after` is no item of the list."""
        ordered = items[::-1] if self.newest_first else items
        start = 0
        if self.after is not None:
            ids = [item.id for item in ordered]
            if self.after not in ids:
                raise bad_request("`after` must be the id of an item of the list.", "after")
            start = ids.index(self.after) + 1
        shown = ordered[start : start + self.limit]
        return {
            "object": "list",
            "data": [_shown(item) for item in shown],
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": start + self.limit < len(ordered),
        }


def _shown(item: Item) -> dict[str, Any]:
    """In full, as OpenAI lists what was sent in short."""
    fields = msgspec.to_builtins(item)
    if (item.type or "message") == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        content = item.content if isinstance(item.content, list) else [Part(kind, item.content or "")]
        fields |= {"type": "message", "status": item.status or "completed", "content": msgspec.to_builtins(content)}
    return fields
