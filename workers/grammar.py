"""Grammars in the sampling rank: what is built once (`GrammarStore`), and one row's way through it (`Matcher`).

Imports llguidance when the first grammar comes. It lets the interpreter's lock go while it builds and while it
computes masks, so neither holds up the thread that drives the device.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slipring.shm.control import BuildGrammar, DropGrammar, GrammarBuilt, LoadTokenizer, Message
from slipring.shm.grammar import LIMITS, Grammar, deep_stacks
from slipring.shm.spec import ModelSpec

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer


def num_mask_words(vocab_size: int) -> int:
    """int32 words of a token mask."""
    return -(-vocab_size // 32)


_KEPT_LEAVING = 256
"""Dropped grammars that are kept a while longer."""


class Build:
    """What all matchers that are copied from each other have in common."""

    is_spent = False
    """One of them has failed, so the others may fail, too."""


class Matcher:
    """One output and its grammar: how far it has come, and what may follow. One thread at a time.

    The bits of a mask are tokens, the lowest first. Ends of sequence are allowed where the output is complete, and
    alone where nothing else can follow, or one has been drawn. Once `error` is set, the matcher knows nothing any
    more.
    """

    def __init__(self, inner: LLMatcher, eos: frozenset[int], text: str, build: Build) -> None:
        """`text`: of the grammar."""
        self.inner, self.text, self.build = inner, text, build
        self._eos = eos
        self.num_accepted = 0
        self.num_ends = 0
        """Of the accepted tokens, those from the end of sequence on. llguidance keeps no count of them."""

    @property
    def error(self) -> str | None:
        return self.inner.get_error() or None

    def accept(self, tokens: list[int]) -> None:
        """Go on by these tokens. Whatever follows an end of sequence changes nothing."""
        for token in tokens:
            if not self.ends_with(token):
                self.inner.consume_token(token)

    def ends_with(self, token: int) -> bool:
        """Take note of one token; False where `inner` must consume it before the next one."""
        self.num_accepted += 1
        self.num_ends += self.num_ends > 0 or (token in self._eos and self.inner.is_accepting())
        return self.num_ends > 0

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        self.num_accepted -= num_tokens
        within = max(0, num_tokens - self.num_ends)
        self.num_ends -= num_tokens - within
        if within:
            self.inner.rollback(within)

    def forced(self) -> list[int]:
        """Tokens that must come next, as far as they are certain."""
        return [] if self.num_ends else self.inner.compute_ff_tokens()

    def fill(self, mask: NDArray[np.int32]) -> None:
        """mask [num_mask_words] = what may come next."""
        self.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.close(mask)

    def close(self, mask: NDArray[np.int32]) -> None:
        """What `inner` has filled is not the whole truth: it does not know that the output has ended."""
        if self.num_ends:
            mask[:] = 0
            for token in self._eos:
                mask.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))

    def copy(self) -> Matcher:
        """Another one at the same place. Both share what either finds out of the grammar, and llguidance's limits on
        that: where one has met them, the other fails too."""
        twin = Matcher(self.inner.deep_copy(), self._eos, self.text, self.build)
        twin.num_accepted, twin.num_ends = self.num_accepted, self.num_ends
        return twin


class MatcherBatch:
    """Many matchers in one call, during which the interpreter's lock is free. One thread at a time."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None

    def accept(self, matchers: list[Matcher], tokens: list[int]) -> None:
        """Each goes on by one token."""
        pairs = zip(matchers, tokens, strict=True)
        if within := [(matcher.inner, token) for matcher, token in pairs if not matcher.ends_with(token)]:
            self._ready().consume_token_par(within)

    def fill(self, matchers: list[Matcher], masks: NDArray[np.int32], rows: list[int]) -> None:
        """masks [n, num_mask_words], contiguous; matcher i fills row rows[i]."""
        pairs = [(matcher.inner, row) for matcher, row in zip(matchers, rows, strict=True)]
        if pairs:
            self._ready().unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.strides[0], len(masks))
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.close(masks[row])

    def _ready(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        return self._executor


class GrammarStore:
    """Matchers at their beginning, by grammar id. Built by the control thread, copied by whoever admits a row."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._tokenizer: LLTokenizer | None = None
        self._matchers: dict[int, Matcher] = {}
        self._leaving: dict[int, Matcher] = {}
        """Dropped lately: a step that was published before the drop may still begin a row with one."""
        self._refusal = "the worker has no tokenizer"
        self._lock = threading.Lock()

    def handle(self, message: Message) -> GrammarBuilt | None:
        """One control message; returns its answer."""
        if isinstance(message, LoadTokenizer):
            try:
                self._tokenizer = self._load(message.document)
            except Exception as error:  # then every grammar is refused, and only those who asked for one suffer
                self._refusal = f"the tokenizer cannot be used for grammars: {error}"
        elif isinstance(message, BuildGrammar):
            return GrammarBuilt(message.grammar_id, self._build(message.grammar_id, message.grammar))
        elif isinstance(message, DropGrammar):
            with self._lock:
                if (matcher := self._matchers.pop(message.grammar_id, None)) is not None:
                    self._leaving[message.grammar_id] = matcher
                    while len(self._leaving) > _KEPT_LEAVING:
                        del self._leaving[next(iter(self._leaving))]
        return None

    def matcher(self, grammar_id: int) -> Matcher:
        """A matcher at the beginning. Raises KeyError for a grammar that is not here."""
        with self._lock:
            return self._held(grammar_id)[grammar_id].copy()

    def unspent(self, grammar_id: int) -> Matcher | None:
        """Likewise, if none of those that it shares anything with has failed."""
        with self._lock:
            found = self._held(grammar_id).get(grammar_id)
            return None if found is None or found.build.is_spent else found.copy()

    def anew(self, grammar_id: int, text: str, keep: bool) -> Matcher:
        """Likewise, built now: it shares nothing with any that was handed out before. `keep`: copies of it are handed
        out from now on."""
        with deep_stacks():
            builder = ThreadPoolExecutor(1)
            building = builder.submit(self._begin, text)
        with builder:
            built = building.result()
        with self._lock:
            if keep and grammar_id in (held := self._held(grammar_id)):
                held[grammar_id] = built
        return built.copy()

    def _held(self, grammar_id: int) -> dict[int, Matcher]:
        return self._matchers if grammar_id in self._matchers else self._leaving

    def _load(self, document: bytes) -> LLTokenizer:
        from llguidance import LLTokenizer

        eos = list(self._spec.eos_token_ids)
        return LLTokenizer(document.decode(), n_vocab=self._spec.vocab_size, eos_token=eos)

    def _build(self, grammar_id: int, grammar: Grammar) -> str | None:
        """Returns why it cannot be."""
        if self._tokenizer is None:
            return self._refusal
        built = self._begin(grammar.text)
        if (error := built.error) is not None:
            return error
        with self._lock:
            self._matchers[grammar_id] = built
        return None

    def _begin(self, text: str) -> Matcher:
        from llguidance import LLMatcher, LLParserLimits

        assert self._tokenizer is not None
        inner = LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
        built = Matcher(inner, frozenset(self._spec.eos_token_ids), text, Build())
        # The first mask is the dearest; copies take over what it found out.
        built.fill(np.zeros(num_mask_words(self._spec.vocab_size), np.int32))
        return built
