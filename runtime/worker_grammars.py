"""`WorkerGrammars`: which grammars an epoch's worker has built, which it has been asked for, and who waits for them.

A request holds its grammar from the moment it wants to join the line to its end. It joins only when the worker has
built the grammar, so it never holds up the requests behind it. Grammars that nobody holds are kept for the next
request, the last `_KEPT_IDLE` of them; equal grammars are one.

    sent ──▶ built ──▶ (dropped, once idle too long)
       └───▶ failed ──▶ (forgotten at once; whoever waits is told)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from slipring.runtime.tokenizer import Tokenizer
from slipring.scheduler.request import Request
from slipring.shm.control import BuildGrammar, ControlEnd, DropGrammar, GrammarBuilt, LoadTokenizer
from slipring.shm.grammar import Grammar

_KEPT_IDLE = 64

Then = Callable[[str | None], None]
"""Told once: None when the grammar is there, or why it could not be built."""


@dataclass(slots=True)
class _Entry:
    grammar_id: int
    grammar: Grammar
    holders: set[int] = field(default_factory=set)
    """id() of the requests that need it."""
    built: bool = False
    waiting: list[Then] = field(default_factory=list)


class WorkerGrammars:
    """Everything in here runs on the event loop's thread."""

    def __init__(self, control: ControlEnd) -> None:
        self._control = control
        self._entries: dict[int, _Entry] = {}
        self._ids: dict[Grammar, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Ids of built grammars that nobody holds, the one that has been idle longest first."""
        self._last_id = 0
        self._has_tokenizer = False

    def load_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Must come before the first grammar; later calls do nothing."""
        if not self._has_tokenizer:
            self._has_tokenizer = True
            self._control.send(LoadTokenizer(tokenizer.document))

    def require(self, request: Request, grammar: Grammar, then: Then) -> None:
        """Hold the grammar until `release`, and write its id into the request's parameters.

        `then` is called once the worker has it: at once if it has it already.
        """
        if (grammar_id := self._ids.get(grammar)) is None:
            grammar_id = self._send(grammar)
        request.params = msgspec.structs.replace(request.params, grammar=grammar_id)
        entry = self._entries[grammar_id]
        entry.holders.add(id(request))
        self._idle.pop(grammar_id, None)
        if entry.built:
            then(None)
        else:
            entry.waiting.append(then)

    def release(self, request: Request) -> None:
        """The request has ended. Does nothing for one that holds no grammar."""
        entry = self._entries.get(request.params.grammar)
        if entry is not None and id(request) in entry.holders:
            entry.holders.remove(id(request))
            self._settle(entry)

    def on_built(self, answer: GrammarBuilt) -> None:
        entry = self._entries[answer.grammar_id]
        entry.built = answer.error is None
        waiting, entry.waiting = entry.waiting, []
        if entry.built:
            self._settle(entry)
        else:
            del self._entries[answer.grammar_id], self._ids[entry.grammar]
        for then in waiting:
            then(answer.error)

    def _send(self, grammar: Grammar) -> int:
        self._last_id += 1
        self._ids[grammar] = self._last_id
        self._entries[self._last_id] = _Entry(self._last_id, grammar)
        self._control.send(BuildGrammar(self._last_id, grammar))
        return self._last_id

    def _settle(self, entry: _Entry) -> None:
        """What becomes of a grammar that perhaps nobody holds any more."""
        if entry.holders or not entry.built:
            return
        self._idle[entry.grammar_id] = None
        while len(self._idle) > _KEPT_IDLE:
            self._drop(self._idle.popitem(last=False)[0])

    def _drop(self, grammar_id: int) -> None:
        del self._ids[self._entries.pop(grammar_id).grammar]
        self._control.send(DropGrammar(grammar_id))
