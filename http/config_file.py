"""`--config FILE`: flags from a YAML or JSON file, as if they stood at the beginning of the command line.

    model: smollm2
    port: 8123
    enable-prefix-caching: false
    served-model-name: [small, smollm2]
    speculative-config: {method: ngram, num_speculative_tokens: 5}

Keys are the flags' names, with - or _. What stands on the command line itself wins.
"""

from __future__ import annotations

import argparse
import difflib
import json
from argparse import _AppendAction, _ExtendAction
from pathlib import Path
from typing import Any


class ConfigFileError(Exception):
    """The message says where and what would be accepted."""


def arguments(path: str, parser: argparse.ArgumentParser, given: list[str]) -> list[str]:
    """What the file adds to the arguments `given`. Raises ConfigFileError."""
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    stated = {actions[flag].dest for word in given if (flag := word.partition("=")[0]) in actions}
    found: list[str] = []
    for key, value in _mapping(path).items():
        name = str(key).replace("_", "-")
        if name == "model":
            found += [] if _has_model(given) else [_scalar(path, name, value)]
            continue
        action = actions.get(f"--{name}")
        if action is None or name in ("config", "help"):
            near = difflib.get_close_matches(f"--{name}", actions, 1, 0.5)
            hint = f" Did you mean {near[0][2:]}?" if near else " See slipring serve --help."
            raise ConfigFileError(f"{path}: there is no flag {name!r}.{hint}")
        if action.dest not in stated and value is not None:
            found += _words(path, name, action, value)
    return found


def _has_model(given: list[str]) -> bool:
    return bool(given) and not given[0].startswith("-")


def _mapping(path: str) -> dict[Any, Any]:
    import yaml  # reads JSON, too

    try:
        value = yaml.safe_load(Path(path).read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ConfigFileError(f"--config {path}{_place(error)}") from None
    except OSError as error:
        raise ConfigFileError(f"--config {path}: {error.strerror}") from None
    except UnicodeError as error:
        raise ConfigFileError(f"--config {path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigFileError(f"--config {path}: the file must hold names of flags and their values")
    return value


def _place(error: Exception) -> str:
    """What the parser says, in one line, behind the line that it says it of."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    where = "" if mark is None else f", line {mark.line + 1}"
    return f"{where}: it is neither YAML nor JSON: {' '.join(str(problem or error).split())}"


def _words(path: str, name: str, action: argparse.Action, value: Any) -> list[str]:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigFileError(f"{path}: {name} must be true or false, got {value!r}")
        if value:
            return [f"--{name}"]
        return [f"--no-{name}"] if isinstance(action, argparse.BooleanOptionalAction) else []
    if isinstance(value, dict) and action.metavar == "JSON":
        return [f"--{name}={_json(path, name, value)}"]
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not isinstance(action, (_AppendAction, _ExtendAction)):
        raise ConfigFileError(f"{path}: {name} takes one value, got a list of {len(value)}")
    return [f"--{name}={_scalar(path, name, item)}" for item in values]


def _json(path: str, name: str, value: dict[Any, Any]) -> str:
    def refuse(part: object) -> None:
        raise ConfigFileError(f"{path}: {name} holds what JSON cannot: {part!r}; put a text in quotation marks")

    try:
        return json.dumps(value, default=refuse)
    except (TypeError, ValueError, RecursionError) as error:  # a key that is no text; an alias of what it stands in
        raise ConfigFileError(f"{path}: {name} cannot be written as JSON: {error}") from None


def _scalar(path: str, name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigFileError(f"{path}: {name} must be a text or a number, got {value!r}")
    return str(value)
