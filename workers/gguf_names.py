"""What a GGUF file calls and permutes differently from Hugging Face."""

from __future__ import annotations

import re

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def canonical_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; names without a counterpart stay as they are."""
    if (match := _LAYER.fullmatch(name)) is None:
        return _TOP.get(name, name)
    layer, part, kind = match.groups()
    return f"model.layers.{layer}.{_IN_LAYER.get(part, part)}.{kind}"


def permuted_heads(name: str, architecture: str, num_heads: int, num_kv_heads: int) -> int | None:
    """Heads by which the rows of this tensor (canonical name) are permuted, or None.

    llama.cpp's converter reorders q and k of the llama architecture for interleaved RoPE; other families are kept.
    """
    if architecture != "llama":
        return None
    part = name.rsplit(".", 2)[-2]
    return {"q_proj": num_heads, "k_proj": num_kv_heads}.get(part)
