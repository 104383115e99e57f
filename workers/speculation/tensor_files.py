"""Files of draft heads: tensors by name, in safetensors or as a pickle of nothing else; matrices as int8 codes."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from slipring.kernels.int8_linear import int8_codes
from slipring.workers.link import StartRefused

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@contextmanager
def refusing() -> Iterator[None]:
    """Whatever is wrong with a head's files ends the worker's start with a sentence that says so."""
    try:
        yield
    except (OSError, ValueError, SafetensorError, msgspec.DecodeError) as error:
        raise StartRefused(f"the head for --speculative-config cannot be loaded: {error}") from error


def first_file(path: Path, names: Sequence[str]) -> Path:
    """The first of these files that the directory has. Raises ValueError."""
    for name in names:
        if (path / name).is_file():
            return path / name
    raise ValueError(f"{path}: holds none of {', '.join(names)}")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Raises OSError or SafetensorError, or ValueError when a pickle holds anything but named tensors."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return _unpickled(file, "cpu")


def _unpickled(file: Path, device: str) -> dict[str, Tensor]:
    try:
        tensors = torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file} holds more than tensors: {error}") from error
    except (EOFError, RuntimeError) as error:
        raise ValueError(f"{file} cannot be read: is it whole? ({error})") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{file} is no dictionary of tensors")
    return tensors


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors that `read_tensors` reads; raises what it raises."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return {name: tuple(tensor.shape) for name, tensor in _unpickled(file, "meta").items()}


def write_head(path: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    """Write the directory `path`. Whoever reads a file meanwhile finds the old one or the new one, whole."""
    path.mkdir(parents=True, exist_ok=True)
    _replace(path / WEIGHTS, save(tensors))  # save_file's can be read by their owner alone
    _replace(path / CONFIG, (json.dumps(config, indent=1) + "\n").encode())


def _replace(file: Path, content: bytes) -> None:
    """With the mode that any new file gets, whatever an old one's was."""
    written = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        written.write_bytes(content)
        written.replace(file)
    finally:
        written.unlink(missing_ok=True)


def int8_tensors(name: str, matrix: Tensor) -> dict[str, Tensor]:
    """matrix (out, in) as `int8_codes`."""
    codes, scale = int8_codes(matrix)
    return {f"{name}.codes": codes, f"{name}.scale": scale}


def check_shape(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError."""
    if tensor.shape != shape:
        found, needed = list(tensor.shape), list(shape)
        raise ValueError(f"{path}: {name} is {found}, this model needs {needed}: made for another model?")


def check_tokens(path: Path, token_ids: Tensor, vocab_size: int) -> None:
    """A head's vocabulary must be within the target's. Raises ValueError."""
    if (beyond := token_ids[(token_ids < 0) | (token_ids >= vocab_size)]).numel():
        raise ValueError(f"{path}: the head guesses token {int(beyond[0])}, this model has {vocab_size}")


def check_taps(path: Path, taps: Sequence[int], num_layers: int) -> None:
    """A head reads the residual stream behind so many of the target's layers each. Raises ValueError."""
    if list(taps) != sorted(set(taps)) or not all(1 <= tap <= num_layers for tap in taps):
        raise ValueError(f"{path}: the target has no rising layers {list(taps)}: it has {num_layers}")
