"""Responses that can be asked for again, or answered again: in memory, bounded in number and in bytes.

What is kept is encoded JSON, so that its size is known and the garbage collector has nothing to walk through. Every
response holds its whole conversation, so none depends on another being kept. The one longest not asked for goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from slipring.http.responses_bodies import Item

_ITEMS = msgspec.json.Decoder(list[Item])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: bytes
    """The response object, as JSON."""
    items: bytes
    """The conversation as JSON: what was read, then what was answered."""
    num_read: int
    """So many of the items were read."""
    item_ids: tuple[str, ...]

    @classmethod
    def of(cls, body: bytes, read: Sequence[Item], answered: Sequence[Item]) -> StoredResponse:
        items = [*read, *answered]
        ids = tuple(item.id for item in items if item.id)
        return cls(body, msgspec.json.encode(items), len(read), ids)

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.items) + sum(map(len, self.item_ids))

    def conversation(self) -> list[Item]:
        return _ITEMS.decode(self.items)


class ResponseStore:
    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """`max_responses` 0: nothing is kept."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._holder: dict[str, str] = {}
        """Of an item, the response last stored with it."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Replaces what has the same id. What is larger than everything together may be is not kept."""
        self.remove(response_id)
        if stored.num_bytes > self._max_bytes or self._max_responses == 0:
            return
        self._stored[response_id] = stored
        self.num_bytes += stored.num_bytes
        for item_id in stored.item_ids:
            self._holder[item_id] = response_id
        while self.num_bytes > self._max_bytes or len(self._stored) > self._max_responses:
            self.remove(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse | None:
        stored = self._stored.get(response_id)
        if stored is not None:
            self._stored.move_to_end(response_id)
        return stored

    def remove(self, response_id: str) -> bool:
        stored = self._stored.pop(response_id, None)
        if stored is None:
            return False
        self.num_bytes -= stored.num_bytes
        for item_id in stored.item_ids:
            if self._holder.get(item_id) == response_id:
                del self._holder[item_id]
        return True

    def find_item(self, item_id: str) -> Item | None:
        """An item of any stored conversation."""
        stored = self.get(self._holder.get(item_id, ""))
        if stored is None:
            return None
        return next((item for item in stored.conversation() if item.id == item_id), None)
