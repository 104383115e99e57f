"""`Grammar`: what constrains a request's output, as it travels from the engine to the worker that enforces it.

The engine compiles and checks it (`runtime/grammar.py`), the worker builds a matcher of the same text under the same
limits (`workers/grammar.py`), so what passed here is built there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

MAX_GRAMMAR_BYTES: Final = 1 << 20
"""Longest text of a grammar. A schema that a person or a program writes for a model has a few kilobytes."""

STACK_BYTES: Final = 512 << 20
"""Stack of a thread that builds grammars, most of it never touched. llguidance descends from rule to rule on it, about
13 KB for each: the 8 MiB that threads have end the process at a chain of 1,500, and MAX_GRAMMAR_BYTES hold 20,000."""

LIMITS: Final = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""llguidance's bounds on building a matcher and on one mask, as arguments of its `LLParserLimits`. About 14,000 lexer
fuel or 20,000 items are a millisecond, and a lexer state takes one or two kilobytes."""


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that are started here may build grammars."""
    before = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


class Grammar(msgspec.Struct, frozen=True):
    """A checked grammar. Equal grammars are one grammar to the worker."""

    text: str
    """llguidance's own serialisation, at most MAX_GRAMMAR_BYTES."""
    kind: str
    """What it was made from, for people: a kind of `runtime.grammar.GrammarSpec`."""
