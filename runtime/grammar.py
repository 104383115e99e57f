"""`GrammarSpec` to `Grammar`: compiles and checks what a request wants its output to look like, off the loop.

The check builds the grammar as the worker will, under the same limits (`shm.grammar.LIMITS`), and looks at its first
mask, so what is bad, unsupported, too large or without any valid output is refused here, as a 400, and not in the
middle of a step. llguidance lets the loop run while it works, and is imported when the first grammar comes: an engine
that never sees one never pays for it.

JSON is written with bounded white space, whatever the model would like, so that it cannot run away in blanks.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import orjson

from slipring.runtime.request import InvalidRequestError
from slipring.shm.grammar import LIMITS, MAX_GRAMMAR_BYTES, Grammar
from slipring.shm.spec import ModelSpec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from slipring.runtime.tokenizer import Tokenizer

_THREADS = 2
_CACHED = 256
"""Grammars kept compiled."""


class GrammarSpec(msgspec.Struct, frozen=True):
    """What the output must match. Hashable: equal specs are compiled once."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark"]
    value: str = ""
    """json_schema: the schema as JSON text. regex: the expression, which the whole output matches. choice: a JSON list
    of strings. lark: a grammar in llguidance's dialect, which may embed `%json {...}` and name special tokens."""
    compact: bool = False
    """No white space between the tokens of JSON (json_object and json_schema)."""


class GrammarCompiler:
    """One for each engine. `compile` is for the loop's thread."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._known: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="slipring-grammar")
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    async def compile(self, spec: GrammarSpec, param: str, tokenizer: Tokenizer) -> Grammar:
        """Raises InvalidRequestError, on `param`, that says what is wrong and where."""
        if (known := self._known.get(spec)) is not None:
            self._known.move_to_end(spec)
            return known
        if len(spec.value.encode()) > MAX_GRAMMAR_BYTES // 2:
            raise InvalidRequestError(f"`{param}` is too large: at most {MAX_GRAMMAR_BYTES // 2} bytes.", param)
        work = partial(self._compile, spec, tokenizer)
        try:
            grammar = await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except ValueError as error:
            raise InvalidRequestError(f"`{param}` cannot be used: {error}", param) from None
        self._known[spec] = grammar
        while len(self._known) > _CACHED:
            self._known.popitem(last=False)
        return grammar

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, spec: GrammarSpec, tokenizer: Tokenizer) -> Grammar:
        """Raises ValueError with the reason."""
        from llguidance import LLMatcher, LLParserLimits

        text = _text(spec)
        matcher = LLMatcher(self._vocabulary(tokenizer), text, log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error() and not any(matcher.compute_bitmask()):
            raise ValueError("nothing can match it.")
        if matcher.is_error():
            raise ValueError(matcher.get_error().strip())
        return Grammar(text, spec.kind)

    def _vocabulary(self, tokenizer: Tokenizer) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._tokenizer is None:
                vocabulary: Any = _Vocabulary(self._spec, tokenizer)
                self._tokenizer = LLTokenizer(
                    TokenizerWrapper(vocabulary),
                    n_vocab=self._spec.vocab_size,
                    eos_token=list(self._spec.eos_token_ids),
                )
                _ = tokenizer.document  # the worker will want it, and it takes a while to write
            return self._tokenizer


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        self.eos_token_id = spec.eos_token_ids[0]
        self.bos_token_id = spec.bos_token_id
        self.tokens = tokenizer.all_token_bytes(spec.vocab_size)
        self.special_token_ids = list(tokenizer.special_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"), False)


_WHITESPACE = r" |\n[ ]{0,20}"
"""One space, or a line break and an indentation."""


def _text(spec: GrammarSpec) -> str:
    """llguidance's serialisation, unchecked. Raises ValueError."""
    from llguidance import LLMatcher

    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(spec.value)
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.value)
    if spec.kind == "choice":
        choices = orjson.loads(spec.value)
        return LLMatcher.grammar_from_lark("start: " + " | ".join(orjson.dumps(text).decode() for text in choices))
    schema = '{"type":"object"}' if spec.kind == "json_object" else spec.value
    overrides: Any = {
        "whitespace_flexible": not spec.compact,
        "whitespace_pattern": None if spec.compact else _WHITESPACE,
    }
    return LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
