"""`GrammarSpec` to `Grammar`: compiles and checks what a request wants its output to look like, off the loop.

The check builds the grammar as the worker will, under the same limits (`shm.grammar.LIMITS`), looks at its first mask
and goes one token further, so what is bad, unsupported, too large or without any valid output is refused here, as a
400, and not in the middle of a step. llguidance lets the loop run while it works, and is imported when the first
grammar comes: an engine that never sees one never pays for it.

JSON is written with bounded white space, whatever the model would like, so that it cannot run away in blanks.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import orjson

from slipring.runtime.lark_rules import can_end
from slipring.runtime.request import InvalidRequestError
from slipring.runtime.schema_times import times_as_patterns
from slipring.shm.grammar import LIMITS, MAX_GRAMMAR_BYTES, Grammar, deep_stacks
from slipring.shm.spec import ModelSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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
            with deep_stacks():
                future = self._pool.submit(work)  # this is where the pool begins its threads
            grammar = await asyncio.wrap_future(future)
        except (ValueError, TypeError, RecursionError) as error:  # the last two: nested too deeply
            reason = str(error)[:_MOST_WORDS]
            raise InvalidRequestError(f"`{param}` cannot be used: {reason}", param) from None
        self._known[spec] = grammar
        while len(self._known) > _CACHED:
            self._known.popitem(last=False)
        return grammar

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, spec: GrammarSpec, tokenizer: Tokenizer) -> Grammar:
        """Raises ValueError with the reason."""
        from llguidance import LLMatcher, LLParserLimits

        if spec.kind == "lark":
            spec = msgspec.structs.replace(spec, value=_lark(spec.value))
        text = _text(spec)
        matcher = LLMatcher(self._vocabulary(tokenizer), text, log_level=0, limits=LLParserLimits(**LIMITS))
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if not matcher.is_error() and not any(mask):
            raise ValueError(_NOTHING)
        if matcher.is_error():
            raise ValueError(_reason(spec, matcher.get_error()))
        if spec.kind == "lark" and not can_end(spec.value):
            raise ValueError(f"{_NOTHING} that ever ends")
        if (error := _stuck(matcher, mask)) is not None:
            raise ValueError(f"no answer can get beyond its first token: {_reason(spec, error)}")
        return Grammar(text, spec.kind)

    def _vocabulary(self, tokenizer: Tokenizer) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        if not self._spec.eos_token_ids:
            raise ValueError("this model has no end of sequence, with which a grammar could end an answer")
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


_NOTHING = "nothing can match it"
_MOST_CHOICES = 60_000
_TOO_MANY = "it has more than 65,525 parts (rules, alternatives, literals): use fewer, or a regular expression"
_MOST_FIRST = 4
"""First tokens that are tried."""


def _stuck(matcher: LLMatcher, mask: bytes) -> str | None:
    """Why none of a few first tokens can be followed; None where one can. Moves on only copies."""
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
    error = None
    for token in allowed[:: max(1, len(allowed) // _MOST_FIRST)][:_MOST_FIRST].tolist():
        further = matcher.deep_copy()
        if further.consume_token(token) and not further.is_stopped():
            further.compute_bitmask()
        error = further.get_error() if further.is_error() else None
        if error is None:
            return None
    return error


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
        choices = dict.fromkeys(orjson.loads(spec.value))
        if len(choices) > _MOST_CHOICES:
            raise ValueError(f"it has {len(choices)} different choices: at most {_MOST_CHOICES}")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(orjson.dumps(text).decode() for text in choices))
    schema = '{"type":"object"}' if spec.kind == "json_object" else spec.value
    if schema.strip() in ("true", "false"):
        schema = "{}" if schema.strip() == "true" else '{"enum":[]}'
    if '"time"' in schema or '"date-time"' in schema:
        try:
            schema = orjson.dumps(times_as_patterns(orjson.loads(schema))).decode()
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    overrides: Any = {
        "item_separator": ",",
        "key_separator": ":",
        "lenient": False,
        "coerce_one_of": False,
        "whitespace_flexible": not spec.compact,
        "whitespace_pattern": None if spec.compact else _WHITESPACE,
    }
    return LLMatcher.grammar_from_json_schema(schema, overrides=overrides)


def _lark(text: str) -> str:
    """llama.cpp's notation, which vLLM calls EBNF, as Lark; Lark as it is. Raises ValueError."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:
        raise ValueError(f"it is no grammar in GBNF: {error}") from None


_NESTING = ("properties", "$defs", "definitions", "patternProperties")
_BRANCHES = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_MOST_LOOKS = 200
_LOOK_S = 0.3
"""For finding the place that a schema is refused for."""
_MOST_WORDS = 500
"""Characters of a reason: it may quote the schema, which may be half a megabyte."""


_OPTIONS = re.compile(r"[.;,]?\s*Enable 'coerce_one_of' option[^.;]*[.;]?")
"""Of llguidance's: nobody who reads this can set it, and what it would do can be said in the schema."""


def _reason(spec: GrammarSpec, error: str) -> str:
    """What llguidance says, and for a schema the part of it that it says it of."""
    words = error.split("<state>")[0].split("<non-verbose/>")[0].split("<backtrace>")[0].strip()
    words = _OPTIONS.sub(": use anyOf", words)
    if "grammar.symbols.len()" in words:
        words = _TOO_MANY
    if words.startswith("NoExtension"):
        words = _NOTHING
    if spec.kind != "json_schema":
        return words
    place = _place(orjson.loads(spec.value), words.removesuffix(": use anyOf"))
    return f"{words} (at {place})" if place else words


def _place(root: Any, words: str) -> str:
    """Path of the innermost part of a schema that is refused with the same words."""
    place, schema, until = "", root, time.monotonic() + _LOOK_S
    shared = {name: root[name] for name in ("$defs", "definitions") if isinstance(root, dict) and name in root}
    for _ in range(_MOST_LOOKS):
        parts = (part for part in _parts(schema) if time.monotonic() < until)
        inner = next((part for part in parts if _is_refused(part[1], shared, words)), None)
        if inner is None:
            return place
        place, schema = (f"{place}.{inner[0]}" if place else inner[0]), inner[1]
    return place


def _parts(schema: Any) -> list[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return []
    parts = [(name, schema[name]) for name in _SINGLE if isinstance(schema.get(name), dict)]
    for name in _NESTING:
        if isinstance(schema.get(name), dict):
            parts += [(f"{name}.{key}", part) for key, part in schema[name].items()]
    for name in _BRANCHES:
        if isinstance(schema.get(name), list):
            parts += [(f"{name}[{index}]", part) for index, part in enumerate(schema[name])]
    return parts[:_MOST_LOOKS]


def _is_refused(part: Any, shared: dict[str, Any], words: str) -> bool:
    from llguidance import LLMatcher, LLParserLimits

    alone = {**shared, **part} if isinstance(part, dict) else {**shared, "allOf": [part]}
    grammar = LLMatcher.grammar_from_json_schema(orjson.dumps(alone).decode())
    return words in LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**LIMITS))
