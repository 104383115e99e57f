"""`--speculative-config`: vLLM's keys, checked and given their defaults.

Keys that vLLM has and we do not honour are refused by name: a setting without effect is worse than an error.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from slipring.runtime.draft_tree import MAX_NODES, parse_tree
from slipring.shm.spec import SpeculationSpec

METHODS = ("ngram", "suffix", "grammar", "draft_model", "eagle", "medusa")
TREES, FIXED_TREES = ("ngram", "eagle", "medusa"), ("eagle", "medusa")
"""Methods that may draft trees, and those that may be given one."""
DRAWING = ("draft_model", "eagle", "medusa")
"""Methods that draw their drafts. Other drafts are accepted as often without rejection sampling: with their chance."""
MAX_DRAFT = 32
"""Longest chain of drafts of a row in one step."""
_DEFAULT_DRAFT, _FORCED_DRAFT = 5, 16
_DEFAULT_RANGES = ((1, 8, MAX_NODES), (9, 32, 2), (33, 33, 0))
"""Drafts by the number of decode rows when none are given. A CPU's step costs by its tokens from a few dozen on."""
_HEAD_FILES = {
    "eagle": ("model.safetensors", "pytorch_model.bin"),
    "medusa": ("model.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt"),
}
_KEYS_OF = {"prompt_lookup": "ngram", "suffix_decoding": "suffix"}
"""Beginnings of keys that mean something to one method alone."""
_MISTAKE = re.compile(r"^Expected `(?P<wanted>[^`]+)`(?P<size> of length \d+)?.* - at `\$\.(?P<path>[^`]+)`$")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_TYPES = {"int": "an integer", "str": "a text", "float": "a number", "bool": "true or false", "array": "a list"}
_NGRAM_SIZES = (2, 5)
"""Sizes that are looked up when neither is given. vLLM's are 5 and 5: it has no controller to drop bad drafts."""


class SpeculationError(ValueError):
    """What is wrong with the JSON, naming the key."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As given, with vLLM's names."""

    method: str | None = None
    model: str | None = None
    """The method's model; `ngram` may stand here too, as in older versions of vLLM."""
    num_speculative_tokens: int | None = None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    """(least rows, most rows, drafts), both inclusive; what lies between and after them goes on as before it."""
    num_draft_tree_tokens: int | None = None
    """Most drafts of a row in one step, when they may branch; not vLLM's. `num_speculative_tokens` is their depth."""
    speculative_token_tree: str | list[list[int]] | None = None
    """See `draft_tree.py`."""
    adaptive: bool = True
    """Take the drafts that pay, by measure, rather than all; not vLLM's, which takes all."""
    rejection_sample_method: str | None = None
    """None: drafts are compared with what the target draws."""
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1


def parse_speculation(text: str) -> SpeculativeConfig:
    """Raises SpeculationError."""
    try:
        given = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise SpeculationError(f'not valid JSON ({error}); write \'{{"method": "ngram"}}\'') from None
    if not isinstance(given, dict):
        raise SpeculationError('must be a JSON object, such as \'{"method": "ngram"}\'')
    known = [field.name for field in msgspec.structs.fields(SpeculativeConfig)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise SpeculationError(f"unknown key {key!r}: {hint}")
    try:
        config = msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise SpeculationError(_explain(str(error), given)) from None
    return _checked(config, given)


def _explain(text: str, given: dict[str, Any]) -> str:
    """msgspec's "Expected `int | null`, got `str` - at `$.num_speculative_tokens`" in our words."""
    found = _MISTAKE.search(text)
    if found is None:
        return text.replace("$.", "")
    wanted = " or ".join(_TYPES.get(each, each) for each in found["wanted"].split(" | ") if each != "null")
    if found["size"]:
        wanted += found["size"].replace("length ", "")
    value: Any = given
    for key, index in _STEP.findall(found["path"]):
        value = value[int(index)] if index else value[key]
    return f"{found['path']} must be {wanted}, got {msgspec.json.encode(value).decode()[:80]}"


def draft_widths(config: SpeculativeConfig, max_num_seqs: int) -> tuple[int, ...]:
    """[max_num_seqs + 1]: drafts of a row by the number of decode rows. Raises SpeculationError."""
    most = _num_drafts(config)
    ranges = config.num_speculative_tokens_per_batch_size
    if ranges is None:
        ranges = _DEFAULT_RANGES
    name, end = "num_speculative_tokens_per_batch_size", 0
    widths = [0] * (max_num_seqs + 1)
    for low, high, drafts in ranges:
        if low > high or drafts < 0:
            raise SpeculationError(f"{name}: [{low}, {high}, {drafts}] is no range of rows and a number of drafts")
        if low <= end or (end == 0 and low != 1):
            raise SpeculationError(f"{name}: ranges begin at 1, grow and do not overlap; got {low} after {end}")
        widths[low:] = [min(drafts, most)] * len(widths[low:])
        end = high
    if not ranges:
        raise SpeculationError(f"{name} is empty; write [[1, 16, 5], [17, 64, 2]], or leave it out")
    return tuple(widths)


def worker_speculation(config: SpeculativeConfig) -> SpeculationSpec:
    """What the worker is told."""
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is None and high is None:
        low, high = _NGRAM_SIZES
    return SpeculationSpec(
        method=config.method or "",
        model=config.model,
        tree_depth=draft_depth(config) if _num_drafts(config) > draft_depth(config) else None,
        token_tree=_fixed_tree(config),
        adaptive=config.adaptive,
        rejection_sampling=config.rejection_sample_method is not None,
        prompt_lookup_min=low if low is not None else high or 0,
        prompt_lookup_max=high if high is not None else low or 0,
        suffix_depth=config.suffix_decoding_max_tree_depth,
        suffix_requests=config.suffix_decoding_max_cached_requests,
        suffix_factor=config.suffix_decoding_max_spec_factor,
        suffix_token_prob=config.suffix_decoding_min_token_prob,
    )


def draft_depth(config: SpeculativeConfig) -> int:
    """Most drafts of a row that can be accepted in one step."""
    if tree := _fixed_tree(config):
        return len(tree[-1])
    return config.num_speculative_tokens or _default_draft(config)


def _num_drafts(config: SpeculativeConfig) -> int:
    """Most drafts of a row in one step."""
    return config.num_draft_tree_tokens or len(_fixed_tree(config)) or draft_depth(config)


def _fixed_tree(config: SpeculativeConfig) -> tuple[tuple[int, ...], ...]:
    given = config.speculative_token_tree
    return () if given is None else parse_tree(given)


def _default_draft(config: SpeculativeConfig) -> int:
    """vLLM's rule for suffix decoding: as many as its depth allows. What a grammar forces is always right."""
    if config.method == "grammar":
        return _FORCED_DRAFT
    if config.method == "suffix":
        return min(MAX_DRAFT, config.suffix_decoding_max_tree_depth - 1)
    return _DEFAULT_DRAFT


def _checked(config: SpeculativeConfig, given: Iterable[str]) -> SpeculativeConfig:
    if config.method is None and config.model in ("ngram", "[ngram]"):
        config = msgspec.structs.replace(config, method="ngram", model=None)
    if config.method == "eagle3":  # which of them a head is, its files say
        config = msgspec.structs.replace(config, method="eagle")
    if config.method not in METHODS:
        raise SpeculationError(f"method must be one of {', '.join(METHODS)}; got {config.method!r}")
    if config.num_speculative_tokens is not None and not 1 <= config.num_speculative_tokens <= MAX_DRAFT:
        raise SpeculationError(f"num_speculative_tokens must be from 1 to {MAX_DRAFT}")
    if config.method in ("ngram", "suffix", "grammar") and config.model is not None:
        raise SpeculationError(f"model: {config.method} needs none")
    for begin, method in _KEYS_OF.items():
        if config.method != method and (keys := [key for key in given if key.startswith(begin)]):
            raise SpeculationError(f"{keys[0]} belongs to method {method}, not to {config.method}: leave it out")
    _check_suffix(config)
    _check_tree(config)
    _check_rejection(config)
    if config.method == "draft_model" and not config.model:
        raise SpeculationError("model must be the draft model: a directory, a .gguf file or an alias")
    files = _HEAD_FILES.get(config.method, ())
    if files and not (config.model and any(Path(config.model, name).is_file() for name in files)):
        raise SpeculationError(
            f"model must be the directory of a head, with {' or '.join(files)} (slipring train-draft makes one); "
            f"got {config.model!r}"
        )
    if files and config.model and (other := _method_of(Path(config.model))) not in (None, config.method):
        raise SpeculationError(f"method is {config.method}, but the head in {config.model} is one for {other}")
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    for key, value in (("prompt_lookup_min", low), ("prompt_lookup_max", high)):
        if value is not None and not 1 <= value <= 64:
            raise SpeculationError(f"{key} must be from 1 to 64, got {value}")
    if low is not None and high is not None and low > high:
        raise SpeculationError(f"prompt_lookup_min ({low}) must not be above prompt_lookup_max ({high})")
    return config


def _method_of(head: Path) -> str | None:
    """What a head's config.json says that it is for, if it says so: ours by a name, published ones by their keys."""
    try:
        said = msgspec.json.decode((head / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    if not isinstance(said, dict):
        return None
    if said.get("method") in FIXED_TREES:
        return str(said["method"])
    return "medusa" if "medusa_num_heads" in said else None


def _check_tree(config: SpeculativeConfig) -> None:
    most, depth = config.num_draft_tree_tokens, config.num_speculative_tokens
    if most is not None and config.method not in TREES:
        raise SpeculationError(f"num_draft_tree_tokens is for {', '.join(TREES)}, not for {config.method}")
    if most is not None and not 1 <= most <= MAX_NODES:
        raise SpeculationError(f"num_draft_tree_tokens must be from 1 to {MAX_NODES}, got {most}")
    if config.speculative_token_tree is None:
        return
    if config.method not in FIXED_TREES:
        raise SpeculationError(f"speculative_token_tree is for {' and '.join(FIXED_TREES)}, not for {config.method}")
    if most is not None:
        raise SpeculationError("num_draft_tree_tokens and speculative_token_tree exclude each other: give one of them")
    try:
        tree = _fixed_tree(config)
    except ValueError as error:
        raise SpeculationError(f"speculative_token_tree: {error}") from None
    if depth not in (None, len(tree), len(tree[-1])):
        raise SpeculationError(
            f"num_speculative_tokens is {depth}, but speculative_token_tree has {len(tree)} drafts, "
            f"{len(tree[-1])} deep: leave it out"
        )


def _check_rejection(config: SpeculativeConfig) -> None:
    name, given = "rejection_sample_method", config.rejection_sample_method
    if given is None:
        return
    if given != "standard":
        raise SpeculationError(f"{name} may be 'standard', or left out; got {given!r}")
    if config.method not in DRAWING:
        raise SpeculationError(
            f"{name} is for {', '.join(DRAWING)}, whose drafts are drawn; it makes no difference to {config.method}"
        )
    if config.num_draft_tree_tokens is not None or config.speculative_token_tree is not None:
        raise SpeculationError(f"{name} is for chains: leave out num_draft_tree_tokens and speculative_token_tree")


def _check_suffix(config: SpeculativeConfig) -> None:
    """vLLM's bounds, but for the depth: one token must match for one to be drafted."""
    for key, low, high in (
        ("max_tree_depth", 2, 256),
        ("max_cached_requests", 0, math.inf),
        ("max_spec_factor", 0, math.inf),
        ("min_token_prob", 0, 1),
    ):
        value = getattr(config, f"suffix_decoding_{key}")
        if not low <= value <= high:
            bounds = f"from {low} to {high}" if high < math.inf else f"{low} or more"
            raise SpeculationError(f"suffix_decoding_{key} must be {bounds}, got {value}")
