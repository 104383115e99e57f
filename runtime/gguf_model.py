"""Turns a parsed GGUF header into a `ModelSpec`. Owns the meaning of the metadata keys (llama.cpp's names)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipring.runtime.architectures import FAMILIES, ModelError, check_heads, check_rope_type, unsupported
from slipring.runtime.gguf import GgufError, GgufFile
from slipring.shm.spec import ModelSpec, SamplingDefaults, TensorSpec

CONTROL = 3
"""Token type of special tokens (`tokenizer.ggml.token_type`)."""

END_TOKENS = frozenset({
    "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>",
    "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<EOT>", "<｜end▁of▁sentence｜>",
})  # fmt: skip
"""Control tokens that end an answer whatever the metadata says: files often name one of several."""

_NUMBER = (int, float)
_QUANT_SUFFIX = re.compile(r"[.\-_](?:I?Q\d[\w]*|TQ\d_\d|MXFP4\w*|BF16|F16|F32|FP16|FP32)$", re.IGNORECASE)


def gguf_spec(gguf: GgufFile) -> ModelSpec:
    """Raises ModelError (GgufError for damaged metadata) when the model is of a kind that cannot be served."""
    family = gguf.require("general.architecture", str)
    if family not in FAMILIES:
        raise unsupported(gguf.path, family)
    _refuse_variants(gguf, family)
    tensors = {tensor.name: tensor for tensor in gguf.tensors}
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(f"{gguf.path}: tensor 'token_embd.weight' is missing or not a matrix.")
    return ModelSpec(
        architecture=family,
        name=_name(gguf),
        path=gguf.path,
        format="gguf",
        files=(gguf.path,),
        tensors=gguf.tensors,
        dtype=_dtype(tensors.get("blk.0.attn_q.weight", embedding)),
        vocab_size=embedding.shape[0],
        **_shape(gguf, family),
        rope_scaling=_rope_scaling(gguf, family, tensors),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        eos_token_ids=_end_token_ids(gguf, embedding.shape[0]),
        bos_token_id=gguf.get("tokenizer.ggml.bos_token_id", int),
        sampling_defaults=_sampling_defaults(gguf),
    )


def _refuse_variants(gguf: GgufFile, family: str) -> None:
    if gguf.get("split.count", int, 1) > 1:
        raise ModelError(
            f"{gguf.path} is one part of a split GGUF. Merge the parts first: "
            "llama-gguf-split --merge FIRST-PART.gguf MERGED.gguf"
        )
    if gguf.get(f"{family}.expert_count", int, 0) > 0:
        raise ModelError(f"{gguf.path}: mixture-of-experts variants of {family!r} are not supported.")
    window = gguf.get(f"{family}.attention.sliding_window", int, 0)
    if 0 < window < gguf.require(f"{family}.context_length", int):
        raise ModelError(f"{gguf.path}: a sliding attention window ({window} tokens) is not supported.")


def _shape(gguf: GgufFile, family: str) -> dict[str, Any]:
    def positive(key: str) -> int:
        value = gguf.require(f"{family}.{key}", int)
        if value <= 0:
            raise GgufError(f"{gguf.path}: metadata {family}.{key} is {value}.")
        return value

    hidden_size, num_heads = positive("embedding_length"), positive("attention.head_count")
    head_dim = gguf.get(f"{family}.attention.key_length", int, hidden_size // num_heads)
    num_kv_heads = gguf.get(f"{family}.attention.head_count_kv", int, num_heads)
    check_heads(gguf.path, num_heads, num_kv_heads, head_dim)
    rotated = gguf.get(f"{family}.rope.dimension_count", int, head_dim)
    if rotated != head_dim:
        raise ModelError(f"{gguf.path}: RoPE over {rotated} of {head_dim} dimensions of a head is not supported.")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": positive("feed_forward_length"),
        "num_layers": positive("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positive("context_length"),
        "rms_norm_eps": _decimal(gguf.require(f"{family}.attention.layer_norm_rms_epsilon", _NUMBER)),
        "rope_theta": _decimal(gguf.get(f"{family}.rope.freq_base", _NUMBER, 10000.0)),
    }


def _decimal(value: float) -> float:
    """The decimal that was meant: metadata is f32, where 1e-05 reads as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(gguf: GgufFile, family: str, tensors: Mapping[str, TensorSpec]) -> dict[str, Any] | None:
    """Hugging Face's form. Llama 3's scaling is stored as per-frequency divisors: `rope_type` is then `factors`."""
    if "rope_freqs.weight" in tensors:
        return {"rope_type": "factors", "factors": _read_floats(gguf, tensors["rope_freqs.weight"])}
    kind = gguf.get(f"{family}.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    check_rope_type(gguf.path, kind)
    scaling: dict[str, Any] = {"rope_type": kind}
    for key, name in (
        ("factor", "factor"),
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        value = gguf.get(f"{family}.rope.scaling.{key}", _NUMBER)
        if value is not None:
            scaling[name] = _decimal(value) if isinstance(value, float) else value
    relative = gguf.get(f"{family}.rope.scaling.attn_factor", _NUMBER)
    if kind == "yarn" and relative is not None:
        # llama.cpp multiplies YaRN's own factor by it; Hugging Face's `attention_factor` is the product.
        scaling["attention_factor"] = relative * (0.1 * math.log(max(scaling.get("factor", 1.0), 1.0)) + 1.0)
    return scaling


def _read_floats(gguf: GgufFile, tensor: TensorSpec) -> list[float]:
    if tensor.dtype != "F32" or len(tensor.shape) != 1:
        raise ModelError(f"{gguf.path}: tensor {tensor.name!r} is not a vector of F32.")
    return np.fromfile(gguf.path, "<f4", tensor.shape[0], offset=tensor.offset).tolist()


def _dtype(typical: TensorSpec) -> str:
    return {"BF16": "bfloat16", "F16": "float16"}.get(typical.dtype, "float32")


def _name(gguf: GgufFile) -> str:
    """The file's name without its quantisation: authors keep it true, `general.name` often names a training run."""
    stem = _QUANT_SUFFIX.sub("", Path(gguf.path).stem)
    if stem.lower() in ("model", "ggml-model", "ggml"):
        return gguf.get("general.name", str, stem) or stem
    return stem


def control_token_ids(gguf: GgufFile) -> list[int]:
    """Ids of the vocabulary's control tokens, in order."""
    types = gguf.get("tokenizer.ggml.token_type", np.ndarray)
    return [] if types is None else np.flatnonzero(types == CONTROL).tolist()


def _end_token_ids(gguf: GgufFile, vocab_size: int) -> tuple[int, ...]:
    """What the metadata names first, then the well-known end-of-turn tokens that the vocabulary has."""
    tokens: Sequence[str] = gguf.get("tokenizer.ggml.tokens", Sequence, ())
    named = [gguf.get(f"tokenizer.ggml.{kind}_token_id", int) for kind in ("eos", "eot", "eom")]
    found = [i for i in control_token_ids(gguf) if i < len(tokens) and tokens[i] in END_TOKENS]
    return tuple(dict.fromkeys(i for i in (*named, *found) if i is not None and 0 <= i < vocab_size))


def _sampling_defaults(gguf: GgufFile) -> SamplingDefaults:
    def number(key: str) -> float | None:
        value = gguf.get(f"general.sampling.{key}", _NUMBER)
        return None if value is None else _decimal(value)

    return SamplingDefaults(
        temperature=number("temp"),
        top_p=number("top_p"),
        top_k=gguf.get("general.sampling.top_k", int),
        min_p=number("min_p"),
        repetition_penalty=number("penalty_repeat"),
    )
