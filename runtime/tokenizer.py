"""Text to token ids and back: a thin face over Rust `tokenizers`. Owns what the bytes of one token are.

Decoding is defined on bytes: the bytes of all tokens joined, then read as UTF-8 with each malformed piece as U+FFFD
(`bytes.decode("utf-8", "replace")`). For byte-level BPE that is exactly what `tokenizers` does. For SentencePiece with
byte fallback it differs in one point: `tokenizers` turns a whole run of byte tokens into U+FFFDs when any of them is
malformed, which no stream could follow without holding the run back.

No disk cache: a tokenizer is built from a GGUF's metadata in about a tenth of a second, because the document goes to
Rust as one JSON text instead of through Python lists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import tokenizers

from slipring.runtime.architectures import ModelError
from slipring.runtime.gguf import GgufFile, read_gguf
from slipring.runtime.gguf_tokenizer import gguf_tokenizer_json
from slipring.shm.spec import ModelSpec


def _byte_level_alphabet() -> dict[int, int]:
    """GPT-2's map of printable characters to the bytes they stand for, as a `str.translate` table."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


_MARKER = re.compile("<[|\uff5c].*[|\uff5c]>")
_ALPHABET = _byte_level_alphabet()
_ALPHABET_CHARACTERS = frozenset(map(chr, _ALPHABET))


class _Decoding(NamedTuple):
    """How a token's text becomes bytes."""

    byte_level: bool
    byte_fallback: bool
    """Tokens such as <0x0A> are single bytes."""
    strip_space: bool
    """A text that starts a sequence loses its first space: the encoder had put it there."""

    def token_bytes(self, token: str) -> bytes:
        if self.byte_level:
            if _ALPHABET_CHARACTERS.issuperset(token):
                return token.translate(_ALPHABET).encode("latin-1")
            return token.encode()  # an added token, whose text is meant literally
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace("▁", " ").encode()


class _ByteTable(dict[int, bytes]):
    """Token id to bytes, filled as tokens are met; an id without a token is empty, as in `tokenizers`."""

    def __init__(self, rust: tokenizers.Tokenizer, decoding: _Decoding, skipped: frozenset[int]) -> None:
        super().__init__()
        self._rust = rust
        self._decoding = decoding
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = self._rust.id_to_token(token_id) if 0 <= token_id < 1 << 31 else None
        if token is None:
            return b""  # not kept: ids come from outside, and the table must not outgrow the vocabulary
        data = b"" if token_id in self._skipped else self._decoding.token_bytes(token)
        self[token_id] = data
        return data


class Tokenizer:
    """One model's tokenizer. Safe to share between threads; `encode` lets other threads run while it works."""

    def __init__(
        self, rust: tokenizers.Tokenizer, bos_token: str | None = None, eos_token: str | None = None, path: str = ""
    ) -> None:
        """Raises ModelError when `rust` decodes in a way that is not supported (`path` names it in the message)."""
        # A tokenizer.json may carry the truncation and padding of its training; a server wants the text as it is.
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self._decoding = _decoding_of(rust, path)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.special_ids = frozenset(i for i, t in rust.get_added_tokens_decoder().items() if t.special)
        self.vocab_size = rust.get_vocab_size(with_added_tokens=True)
        """Number of tokens; the model's own `vocab_size` may be padded beyond it."""
        self._longest = max(map(len, rust.get_vocab(with_added_tokens=True)), default=1)
        self._shown = _ByteTable(rust, self._decoding, frozenset())
        self._skipping = _ByteTable(rust, self._decoding, self.special_ids)

    def vocabulary(self) -> dict[str, int]:
        """Ids by token, added ones included."""
        return self._rust.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written in it become their ids; `add_special_tokens` adds BOS or EOS where
        the model wants them. Lone surrogates count as U+FFFD. Bytes for which the vocabulary has no token vanish, as
        in `tokenizers` (SmolLM2 lacks 0xF1, 0xF2 and six control characters). A million characters: 0.2 s."""
        return self.encode_many([text], add_special_tokens)[0]

    def encode_many(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode`, for each of several texts."""
        try:
            return self._encode(texts, add_special_tokens)
        except TypeError:  # what Rust answers to a str that has no UTF-8
            paired = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
            return self._encode(paired, add_special_tokens)

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        # The batch call, because `Tokenizer.encode` keeps the interpreter's lock for as long as it runs.
        found = self._rust.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, continuation: bool = False) -> str:
        """Text of `ids`; ids without a token are nothing. `continuation`: they follow other text (keep the space)."""
        table = self.byte_table(skip_special_tokens)
        text = b"".join([table[i] for i in ids]).decode("utf-8", "replace")
        if self._decoding.strip_space and not continuation:
            return text.removeprefix(" ")
        return text

    def least_tokens(self, text: str) -> int:
        """A lower bound on the tokens of `text`, from its length alone; 0 where a normalizer might shorten it."""
        return len(text) // self._longest if self._decoding.byte_level else 0

    def byte_table(self, skip_special_tokens: bool) -> dict[int, bytes]:
        """Indexable by any id: the bytes that the token adds to a text (empty for skipped and for unknown ones)."""
        return self._skipping if skip_special_tokens else self._shown

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token, special ones included; joined over a text's ids they are the text's UTF-8."""
        return self._shown[token_id]

    def all_token_bytes(self, vocab_size: int) -> list[bytes]:
        """As `token_bytes`, of every id below `vocab_size`. Keeps nothing: it is a table of megabytes."""
        texts = map(self._rust.id_to_token, range(vocab_size))
        return [b"" if text is None else self._decoding.token_bytes(text) for text in texts]

    @cached_property
    def document(self) -> bytes:
        """Everything there is to know of it, as a Hugging Face tokenizer.json."""
        return self._rust.to_str().encode()

    def token_text(self, token_id: int) -> str:
        """The token alone as text; bytes that are no character by themselves show as U+FFFD."""
        return self._shown[token_id].decode("utf-8", "replace")

    def marker_texts(self) -> list[str]:
        """Texts that become one special token wherever they stand. Some vocabularies do not call all theirs special:
        what looks like `<|...|>` is taken for one too."""
        added = self._rust.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special or _MARKER.fullmatch(token.content)]

    def token_id(self, text: str) -> int | None:
        """Id of the token whose entry in the vocabulary is `text`."""
        return self._rust.token_to_id(text)


def load_tokenizer(spec: ModelSpec, gguf: GgufFile | None = None) -> Tokenizer:
    """The tokenizer of `spec`; `gguf` saves reading the header again.

    Raises ModelError: missing (with the fix), damaged, or of a type that is not supported.
    """
    # Rust's thread pool helps only batches, and its idle threads spin for a while on cores that the workers need.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if spec.format == "gguf":
        document = gguf_tokenizer_json(gguf or read_gguf(spec.path))
        texts: dict[str, str | None] = {}
    else:
        document = _read_document(Path(spec.path))
        texts = _special_texts(Path(spec.path))
    try:
        rust = tokenizers.Tokenizer.from_buffer(document)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{spec.path}: the tokenizer cannot be built: {error}") from None
    eos = next(iter(spec.eos_token_ids), None)
    bos_token = texts.get("bos_token", _text(rust, spec.bos_token_id))
    return Tokenizer(rust, bos_token, texts.get("eos_token", _text(rust, eos)), spec.path)


def _text(rust: tokenizers.Tokenizer, token_id: int | None) -> str | None:
    return rust.id_to_token(token_id) if token_id is not None and 0 <= token_id < 1 << 31 else None


def _read_document(directory: Path) -> bytes:
    try:
        return (directory / "tokenizer.json").read_bytes()
    except FileNotFoundError:
        raise ModelError(
            f"{directory} has no tokenizer.json. With transformers installed, this writes one: "
            f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
        ) from None


def _special_texts(directory: Path) -> dict[str, str | None]:
    """`bos_token` and `eos_token` of tokenizer_config.json, as far as it has them (null: the model has none)."""
    path = directory / "tokenizer_config.json"
    try:
        config = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    texts: dict[str, str | None] = {}
    for key in ("bos_token", "eos_token"):
        value = config.get(key) if isinstance(config, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            texts[key] = value
        elif isinstance(config, dict) and key in config:
            texts[key] = None
    return texts


def _decoding_of(rust: tokenizers.Tokenizer, path: str) -> _Decoding:
    """Reads the decoder's own description. Raises ModelError for those whose bytes are not known token by token."""
    decoder: Any = rust.decoder
    described: dict[str, Any] = orjson.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    steps: list[dict[str, Any]] = described["decoders"] if described["type"] == "Sequence" else [described]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _Decoding(True, False, False)
    if kinds == {"Metaspace"}:
        return _Decoding(False, False, steps[0].get("prepend_scheme", "always") != "never")
    if "Replace" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _Decoding(False, "ByteFallback" in kinds, "Strip" in kinds)
    raise ModelError(
        f"{path}: tokenizers that decode by {' + '.join(sorted(kinds))} are not supported "
        "(byte-level BPE and SentencePiece with byte fallback are)."
    )
