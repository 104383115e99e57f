"""Which model families can be served, and the error for everything that cannot. Owns the names on both sides."""

from __future__ import annotations

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""`architectures[0]` of a Hugging Face config: our family. Mistral without a sliding window is Llama."""

FAMILIES = ("llama", "qwen2", "qwen3")
"""Our families, which are also GGUF's `general.architecture`."""


ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn", "factors")
"""Kinds of RoPE scaling, by Hugging Face's names; `factors` are a GGUF's explicit divisors per frequency."""


class ModelError(Exception):
    """The model cannot be found, read or served. The message names the problem and, where there is one, the fix."""


def unsupported(path: str, architecture: object) -> ModelError:
    return ModelError(
        f"{path}: architecture {architecture!r} is not supported. Supported: {', '.join(HF_ARCHITECTURES)} "
        f"(safetensors) and {', '.join(FAMILIES)} (GGUF)."
    )


def check_rope_type(path: str, rope_type: object) -> None:
    if rope_type not in ROPE_TYPES:
        raise ModelError(f"{path}: RoPE scaling {rope_type!r} is not supported ({', '.join(ROPE_TYPES)} are).")


def check_heads(path: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Shapes that no attention can have. Raises ModelError."""
    if min(num_heads, num_kv_heads, head_dim) <= 0 or num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"{path}: {num_heads} heads, {num_kv_heads} key-value heads and {head_dim} dimensions do not fit together."
        )
