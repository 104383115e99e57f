"""What the values of flags may look like; argparse calls these and shows what they complain of."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from pathlib import Path

_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def origins(text: str) -> list[str]:
    """An origin or, as vLLM takes it, a JSON list of them."""
    with contextlib.suppress(ValueError):
        found = json.loads(text) if text.startswith("[") else [text]
        if all(isinstance(origin, str) and origin for origin in found):
            return [origin.rstrip("/") for origin in found]
    raise argparse.ArgumentTypeError(f"{text!r} is neither an origin nor a JSON list of origins")


def not_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def key(text: str) -> str:
    if not text or not all("!" <= character <= "~" for character in text):
        raise argparse.ArgumentTypeError("a key must be one or more printable ASCII characters, without spaces")
    return text


def keys_of_file(path: str) -> list[str]:
    """One key a line; empty lines and those that begin with # are skipped."""
    try:
        lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
    except (OSError, UnicodeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None
    found = [key(line) for line in lines if line and not line.startswith("#")]
    if not found:
        raise argparse.ArgumentTypeError(f"{path} holds no key; write one a line")
    return found


def seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 0 or more seconds")
    return seconds


def tokens(text: str) -> int | None:
    """`4096`, `4k` (4000) or `4K` (4096); `auto` and -1 are None: the model's own."""
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d+)([kK]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write 4096, 4K or auto")
    return int(match[1]) * {"": 1, "k": 1000, "K": 1024}[match[2]]


def size(text: str) -> int:
    """Bytes of `512M`, `2G`, `1.5GiB` or a plain number; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 2G, 512M or a number of bytes")
    return int(float(match[1]) * _SUFFIXES[match[2]])


def body_size(text: str) -> int:
    found = size(text)
    if found == 0:
        raise argparse.ArgumentTypeError(f"{text!r} leaves room for no body; write 8M, or another size above 0")
    return found


def port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; write a number from 0 to 65535")
    return int(text)


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is no count; write 0 or more")
    return int(text)


def root_path(text: str) -> str:
    """`/api`; a slash at the end does not matter."""
    path = text.rstrip("/")
    if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise argparse.ArgumentTypeError(f"{text!r} is no path; write /api")
    return path


def url(text: str) -> str:
    if not re.match(r"https?://[^/\s]", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL; write http://HOST:PORT")
    return text


def share(text: str) -> float:
    """A number from 0 to 1."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is no share; write a number from 0 to 1")


def timeout(text: str) -> float:
    """Seconds, more than none."""
    if (value := seconds(text)) == 0:
        raise argparse.ArgumentTypeError("must be more than 0 seconds")
    return value
