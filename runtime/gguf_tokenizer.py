"""Builds a `tokenizer.json` from a GGUF's metadata. Owns how llama.cpp's tokenizer models map to Rust `tokenizers`.

Two models cover the families that are served: `gpt2` (byte-level BPE with a named pre-tokenizer) and `llama`
(SentencePiece BPE with byte fallback, whose merges follow from the scores). The result equals what the model's own
tokenizer.json gives, as far as the metadata tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from slipring.runtime.architectures import ModelError
from slipring.runtime.gguf import GgufError, GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""`tokenizer.ggml.token_type`"""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False)]}


_GPT2 = _byte_level(True)
_DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2]}

_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "default": {"pre_tokenizer": _GPT2},
    "gpt-2": {"pre_tokenizer": _GPT2},
    "smollm": {"pre_tokenizer": _DIGITS},
    "qwen2": {"pre_tokenizer": _split(_QWEN2), "normalizer": {"type": "NFC"}},
    "deepseek-r1-qwen": {"pre_tokenizer": _split(_QWEN2)},
    "llama-bpe": {"pre_tokenizer": _split(_LLAMA3)},
    "llama3": {"pre_tokenizer": _split(_LLAMA3)},
    "llama-v3": {"pre_tokenizer": _split(_LLAMA3)},
}
_MOST_CHARACTERS = 1024
"""Of one token: finding SentencePiece's merges takes the square of it."""
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
"""These take a word that is a token as it is, whatever the merges say, and begin with BOS unless told otherwise."""


def gguf_tokenizer_json(gguf: GgufFile) -> bytes:
    """The tokenizer.json. Raises ModelError: no tokenizer in the file, or one of an unsupported type (named)."""
    model = gguf.get("tokenizer.ggml.model", str)
    if model is None:
        raise ModelError(f"{gguf.path} carries no tokenizer (metadata 'tokenizer.ggml.model' is missing).")
    if model == "gpt2":
        parts, add_bos = _byte_level_bpe(gguf)
    elif model == "llama":
        parts, add_bos = _sentencepiece(gguf)
    else:
        raise ModelError(f"{gguf.path}: tokenizer model {model!r} is not supported (gpt2 and llama are).")
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(gguf),
        "normalizer": None,
        "post_processor": _post_processor(gguf, add_bos),
    } | parts
    return orjson.dumps(document)


def _tokens(gguf: GgufFile) -> Sequence[str]:
    return gguf.require("tokenizer.ggml.tokens", Sequence)


def _types(gguf: GgufFile) -> np.ndarray:
    """One type for each token; a file without types has ordinary tokens only."""
    num_tokens = len(_tokens(gguf))
    types = gguf.get("tokenizer.ggml.token_type", np.ndarray)
    if types is None:
        return np.full(num_tokens, NORMAL)
    if len(types) != num_tokens:
        raise GgufError(f"{gguf.path}: {num_tokens} tokens but {len(types)} token types.")
    return types


def _added_tokens(gguf: GgufFile) -> list[dict[str, Any]]:
    """Tokens that are found in the text before anything else: control tokens (special) and user-defined ones."""
    tokens, types = _tokens(gguf), _types(gguf)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": tokens[i], "special": bool(types[i] != USER_DEFINED)} | plain
        for i in np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL, USER_DEFINED))).tolist()
        if tokens[i]
    ]


def _byte_level_bpe(gguf: GgufFile) -> tuple[dict[str, Any], bool]:
    name = gguf.get("tokenizer.ggml.pre", str, "default")
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"{gguf.path}: pre-tokenizer {name!r} is not supported (supported: {known}).")
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": name in _LLAMA3_NAMES,
        "vocab": {token: i for i, token in enumerate(_tokens(gguf))},
        "merges": list(gguf.require("tokenizer.ggml.merges", Sequence)),
    }
    parts = {"model": model, "decoder": _byte_level(True)} | _PRE_TOKENIZERS[name]
    return parts, name in _LLAMA3_NAMES


def _sentencepiece(gguf: GgufFile) -> tuple[dict[str, Any], bool]:
    tokens = list(_tokens(gguf))
    unknown = gguf.get("tokenizer.ggml.unknown_token_id", int, 0)
    prefix = [{"type": "Prepend", "prepend": "▁"}] if gguf.get("tokenizer.ggml.add_space_prefix", bool, True) else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *strip,
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": tokens[unknown] if unknown < len(tokens) else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": _merges(tokens, _types(gguf), gguf.require("tokenizer.ggml.scores", np.ndarray)),
    }
    normalizer = {"type": "Sequence", "normalizers": [*prefix, replace]}
    decoder = {"type": "Sequence", "decoders": decoders}
    return {"model": model, "normalizer": normalizer, "pre_tokenizer": None, "decoder": decoder}, True


def _merges(tokens: list[str], types: np.ndarray, scores: np.ndarray) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best: every split of a token, best token first."""
    if longest := max(map(len, tokens), default=0) > _MOST_CHARACTERS:
        raise GgufError(f"a token of the vocabulary is longer than {_MOST_CHARACTERS} characters ({longest}).")
    mergeable = {tokens[i] for i in np.flatnonzero(np.isin(types, (NORMAL, UNUSED))).tolist()}
    merges = []
    for i in np.argsort(-scores[: len(tokens)], kind="stable").tolist():
        token = tokens[i]
        if token in mergeable:
            splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            merges += [(left, right) for left, right in splits if left in mergeable and right in mergeable]
    return merges


def _post_processor(gguf: GgufFile, add_bos: bool) -> dict[str, Any] | None:
    """BOS before and EOS after, where the metadata (or the model's custom, `add_bos`) wants them."""
    tokens = _tokens(gguf)
    ends: dict[str, int | None] = {"bos": None, "eos": None}
    for end, default in (("bos", add_bos), ("eos", False)):
        if gguf.get(f"tokenizer.ggml.add_{end}_token", bool, default):
            ends[end] = gguf.get(f"tokenizer.ggml.{end}_token_id", int)
    found = {end: i for end, i in ends.items() if i is not None and 0 <= i < len(tokens)}
    if not found:
        return None

    def template(*sequences: str) -> list[dict[str, Any]]:
        def special(end: str) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": tokens[found[end]], "type_id": 0}}] if end in found else []

        return [
            piece
            for name in sequences
            for piece in (*special("bos"), {"Sequence": {"id": name, "type_id": 0}}, *special("eos"))
        ]

    specials = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in found.values()}
    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": specials,
    }
