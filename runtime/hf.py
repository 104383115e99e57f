"""Turns a Hugging Face directory (config.json + safetensors) into a `ModelSpec`. Owns both file formats.

A safetensors file is u64 header length | JSON header | data; offsets in the header count from the data's start
(https://github.com/huggingface/safetensors#format). Only headers are read, never weights, and every tensor is checked
to lie inside its file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import orjson

from slipring.runtime.architectures import HF_ARCHITECTURES, ModelError, check_heads, check_rope_type, unsupported
from slipring.runtime.hf_quantization import quantization_spec
from slipring.shm.spec import ModelSpec, QuantizationSpec, SamplingDefaults, TensorSpec

MAX_HEADER = 100_000_000
"""The safetensors library's own limit on a header, in bytes."""

_ITEM_SIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class _Config(msgspec.Struct, kw_only=True):
    """The fields of config.json that mean something here, with transformers' defaults."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    architectures: list[str] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    """Qwen's switch; Mistral has none and always uses its window."""
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None


class _GenerationConfig(msgspec.Struct, kw_only=True):
    eos_token_id: int | list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def hf_spec(directory: Path) -> ModelSpec:
    """Raises ModelError: config missing or invalid, architecture unsupported, shard missing, file truncated."""
    raw = _read_json(directory / "config.json")
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else named
    if not isinstance(architecture, str) or architecture not in HF_ARCHITECTURES:
        raise unsupported(str(directory), architecture)
    config = _convert(raw, _Config, directory / "config.json")
    generation = _generation_config(directory)
    _refuse_variants(config, directory)
    files, tensors = _tensor_index(directory)
    family = HF_ARCHITECTURES[architecture]
    return ModelSpec(
        architecture=family,
        name=_name(directory),
        path=str(directory),
        format="safetensors",
        files=files,
        tensors=tensors,
        dtype=_dtype(config, tensors),
        quantization=_quantization(config, directory),
        vocab_size=config.vocab_size,
        **_shape(config, directory),
        **_rope(config, directory),
        tie_word_embeddings=config.tie_word_embeddings or all(t.name != "lm_head.weight" for t in tensors),
        attention_bias=family == "qwen2" or config.attention_bias,
        attention_output_bias=family != "qwen2" and config.attention_bias,
        mlp_bias=family == "llama" and config.mlp_bias,
        qk_norm=family == "qwen3",
        eos_token_ids=_end_token_ids(config, generation),
        bos_token_id=config.bos_token_id,
        sampling_defaults=msgspec.convert(generation, SamplingDefaults, from_attributes=True),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}, so it is not a Hugging Face model directory.") from None
    try:
        # The standard library's parser: generation configs in the wild hold NaN and Infinity, which orjson refuses.
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object.")
    return value


def _convert(raw: dict[str, Any], kind: type[Any], path: Path) -> Any:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from None


def _generation_config(directory: Path) -> _GenerationConfig:
    path = directory / "generation_config.json"
    return _convert(_read_json(path), _GenerationConfig, path) if path.exists() else _GenerationConfig()


def _end_token_ids(config: _Config, generation: _GenerationConfig) -> tuple[int, ...]:
    ids = config.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    # An id beyond the vocabulary can never be drawn, and would be an index out of range in the sampler.
    return tuple(i for i in dict.fromkeys(ids) if 0 <= i < config.vocab_size)


def _refuse_variants(config: _Config, directory: Path) -> None:
    problem = None
    if config.hidden_act != "silu":
        problem = f"the activation {config.hidden_act!r} is not supported (silu is)"
    elif config.partial_rotary_factor != 1.0:
        problem = "RoPE over part of a head is not supported"
    elif _slides(config):
        problem = f"a sliding attention window ({config.sliding_window} tokens) is not supported"
    if problem:
        raise ModelError(f"{directory}: {problem}.")


def _slides(config: _Config) -> bool:
    used = config.use_sliding_window
    if used is None:
        used = (config.architectures or [""])[0] == "MistralForCausalLM"
    return used and (config.sliding_window or math.inf) < config.max_position_embeddings


def _shape(config: _Config, directory: Path) -> dict[str, Any]:
    shape = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads or config.num_attention_heads,
        "head_dim": config.head_dim or config.hidden_size // max(config.num_attention_heads, 1),
        "max_position_embeddings": config.max_position_embeddings,
    }
    for name, value in shape.items():
        if value <= 0:
            raise ModelError(f"{directory / 'config.json'}: {name} is {value}.")
    check_heads(str(directory), shape["num_heads"], shape["num_kv_heads"], shape["head_dim"])
    return shape | {"rms_norm_eps": config.rms_norm_eps}


def _rope(config: _Config, directory: Path) -> dict[str, Any]:
    """transformers 5 keeps theta inside `rope_parameters`, earlier ones beside `rope_scaling`."""
    scaling = dict(config.rope_parameters or config.rope_scaling or {})
    theta = scaling.pop("rope_theta", config.rope_theta)
    scaling["rope_type"] = scaling.pop("type", None) or scaling.get("rope_type", "default")
    if not isinstance(theta, int | float) or scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{directory / 'config.json'}: rope_parameters are of an unsupported kind.")
    if scaling["rope_type"] == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    check_rope_type(str(directory), scaling["rope_type"])
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def _quantization(config: _Config, directory: Path) -> QuantizationSpec | None:
    raw = config.quantization_config
    return None if raw is None else quantization_spec(raw, str(directory))


def _dtype(config: _Config, tensors: tuple[TensorSpec, ...]) -> str:
    named = (config.dtype or config.torch_dtype or "").removeprefix("torch.")
    if named in _DTYPES.values():
        return named
    return next((_DTYPES[tensor.dtype] for tensor in tensors if tensor.dtype in _DTYPES), "float32")


def _name(directory: Path) -> str:
    """The directory's name; for a snapshot in Hugging Face's cache the repository's, not the commit's."""
    if directory.parent.name == "snapshots" and directory.parents[1].name.startswith("models--"):
        return directory.parents[1].name.split("--")[-1]
    return directory.name


def _tensor_index(directory: Path) -> tuple[tuple[str, ...], tuple[TensorSpec, ...]]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    weight_map: dict[str, str] | None = None
    if not single.exists() and index.exists():
        shard_of: dict[str, str] = _convert(_read_json(index).get("weight_map", {}), dict[str, str], index)
        weight_map, names = shard_of, sorted(set(shard_of.values()))
        _check_shards(directory, names)
    else:
        names = [single.name] if single.exists() else [p.name for p in sorted(directory.glob("*.safetensors"))]
    if len(names) != 1 and weight_map is None:
        raise ModelError(_no_weights(directory, names))
    tensors = [t for i, name in enumerate(names) for t in read_safetensors(directory / name, i)]
    if weight_map is not None:
        tensors = [tensor for tensor in tensors if weight_map.get(tensor.name) == names[tensor.file]]
        absent = weight_map.keys() - {tensor.name for tensor in tensors}
        if absent:
            raise ModelError(f"{directory}: tensor {min(absent)!r} is in the index but not in its shard.")
    return tuple(str(directory / name) for name in names), tuple(tensors)


def _check_shards(directory: Path, names: list[str]) -> None:
    strange = [name for name in names if Path(name).name != name]
    if strange:
        raise ModelError(f"{directory}: the index names a shard outside the directory ({strange[0]!r}).")
    missing = [name for name in names if not (directory / name).exists()]
    if missing:
        raise ModelError(
            f"{directory}: {len(missing)} of {len(names)} shards are missing ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}). Finish the download."
        )


def _no_weights(directory: Path, names: list[str]) -> str:
    if names:
        return f"{directory} has several .safetensors files and no model.safetensors.index.json to say which belong."
    if any(directory.glob("pytorch_model*.bin")):
        return f"{directory} holds weights as pickles (pytorch_model.bin) only. Convert them to safetensors first."
    return f"{directory} has no model.safetensors and no model.safetensors.index.json."


def read_safetensors(path: Path, file: int) -> list[TensorSpec]:
    """The tensor index of one file, as file number `file`. Raises ModelError when damaged or truncated."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(MAX_HEADER, size - 8):
            raise ModelError(f"{path} is truncated or not a safetensors file.")
        text = stream.read(length)
    try:
        header = msgspec.convert(orjson.loads(text), dict[str, Any])
        header.pop("__metadata__", None)
        entries = msgspec.convert(header, dict[str, _Entry])
    except ValueError as error:  # msgspec's and orjson's errors are ValueErrors
        raise ModelError(f"{path} has a damaged header: {error}") from None
    return [_place(path, file, name, entry, 8 + length, size) for name, entry in entries.items()]


def _place(path: Path, file: int, name: str, entry: _Entry, data_start: int, size: int) -> TensorSpec:
    begin, end = entry.data_offsets
    nbytes = math.prod(entry.shape) * _ITEM_SIZE.get(entry.dtype, 0)
    if entry.dtype not in _ITEM_SIZE or begin < 0 or min(entry.shape, default=0) < 0 or end - begin != nbytes:
        raise ModelError(f"{path}: tensor {name!r} ({entry.dtype}, shape {entry.shape}) does not fit its bytes.")
    if data_start + end > size:
        raise ModelError(
            f"{path} is truncated: tensor {name!r} ends at byte {data_start + end}, the file has {size}. "
            "Download it again."
        )
    return TensorSpec(name, file, data_start + begin, nbytes, entry.dtype, tuple(entry.shape))
