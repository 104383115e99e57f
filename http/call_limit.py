"""Ends a choice behind its last allowed call, where no grammar does: generation stops, and no hidden tokens count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slipring.http.output_form import OutputForm
from slipring.runtime.request import Delta


class CallLimit:
    """A sink between the engine and an answer's own."""

    def __init__(
        self, form: OutputForm, num_choices: int, push: Callable[[Delta], None], cancel: Callable[[], object]
    ) -> None:
        """`cancel` stops the engine's work, once every choice has ended."""
        self._limit = form.limit
        self._parsers = {index: form.parser() for index in range(num_choices)}
        """Of the choices that go on."""
        self._push = push
        self._cancel = cancel

    def push(self, delta: Delta) -> None:
        parser = self._parsers.get(delta.index)
        if parser is None:
            return
        parser.push(delta)
        if delta.finish_reason is None and parser.num_finished_calls >= self._limit:
            delta.finish_reason = "stop"
            self._end(delta.index)
        self._push(delta)

    def _end(self, index: int) -> None:
        del self._parsers[index]
        if not self._parsers:
            # Not from within the engine's own hand-over of this token.
            asyncio.get_running_loop().call_soon(self._cancel)
