"""Dequantisation against the gguf package, GGUF files against the safetensors they came from, broken checkpoints."""

from __future__ import annotations

from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import torch

from slipring.shm.spec import ModelSpec, TensorSpec
from slipring.workers.dequantize import dequantize_into, row_bytes
from slipring.workers.loader import WeightError, Weights
from tests.workers.runner_rig import Rig
from tests.workers.tiny_models import save_tiny

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN scales in the gguf package

# Every type that the gguf package can decode.
GGML_TYPES = sorted(kind.name for kind in gguf.quants._type_traits)


@pytest.mark.parametrize("dtype", GGML_TYPES)
def test_every_block_type_equals_the_gguf_package(dtype: str) -> None:
    kind = gguf.GGMLQuantizationType[dtype]
    rows, cols = 5, 512
    # Every byte value everywhere: some scales are then NaN or infinite, and must come out as such.
    raw = np.random.default_rng(1).integers(0, 256, (rows, row_bytes(dtype, cols)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(raw, kind).reshape(rows, cols).astype(np.float32))
    assert torch.isfinite(expected).float().mean() > 0.5
    out = torch.empty(rows, cols)
    dequantize_into(torch.from_numpy(raw), dtype, out)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7, equal_nan=True)
    half = torch.empty(rows, cols, dtype=torch.bfloat16)
    dequantize_into(torch.from_numpy(raw), dtype, half)
    torch.testing.assert_close(half, out.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_widths_and_names_are_checked() -> None:
    with pytest.raises(ValueError, match="not whole Q4_1 blocks"):
        row_bytes("Q4_1", 33)
    with pytest.raises(ValueError, match="unknown tensor dtype 'Q9_Z'"):
        row_bytes("Q9_Z", 32)


def to_gguf(spec: ModelSpec, path: Path, quantised: str) -> ModelSpec:
    """Write the checkpoint as llama.cpp's converter does: its names, q and k rows permuted, matrices quantised."""
    kind = gguf.GGMLQuantizationType[quantised]
    weights = Weights(spec, torch.float32)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names |= {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm"}
    names |= {"post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "model.layers.": "blk."}
    index, blob = [], b""
    for tensor in spec.tensors:
        name, data = tensor.name, weights.get(tensor.name, tensor.shape).numpy()
        heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}.get(name.split(".")[-2])
        if heads:
            data = data.reshape(heads, 2, data.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        is_matrix = data.ndim == 2
        stored = gguf.quants.quantize(data, kind) if is_matrix else data
        index.append(
            TensorSpec(name, 0, len(blob), stored.nbytes, kind.name if is_matrix else "F32", tuple(data.shape))
        )
        blob += stored.tobytes()
    path.write_bytes(blob)
    return msgspec.structs.replace(spec, format="gguf", path=str(path), files=(str(path),), tensors=tuple(index))


def test_a_gguf_file_of_the_llama_family_loads_like_its_source(tmp_path: Path) -> None:
    spec, _ = save_tiny("llama", tmp_path / "hf")
    copy = to_gguf(spec, tmp_path / "copy.gguf", "F16")
    prompt = list(range(30, 60))
    outputs = []
    for source in (spec, copy):
        rig = Rig(source)
        sequence = rig.admit(prompt)
        rig.generate([sequence], 8)
        outputs.append(sequence.outputs)
    assert outputs[0] == outputs[1]
    layers = [Rig(source).model.layers[0].attention.qkv_proj for source in (spec, copy)]
    x = torch.eye(spec.hidden_size)
    torch.testing.assert_close(layers[0].forward(x), layers[1].forward(x), rtol=1e-3, atol=1e-3)


def test_quantised_rows_are_permuted_before_they_are_decoded(tmp_path: Path) -> None:
    spec, _ = save_tiny("llama", tmp_path / "hf")
    copy = to_gguf(spec, tmp_path / "copy.gguf", "Q8_0")
    name = "model.layers.1.self_attn.q_proj.weight"
    shape = (spec.num_heads * spec.head_dim, spec.hidden_size)
    exact, close = (Weights(source, torch.float32).get(name, shape) for source in (spec, copy))
    assert (exact - close).abs().max() < 0.02 * exact.abs().max()


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    spec, _ = save_tiny("llama", tmp_path)
    seen: list[tuple[int, int]] = []
    weights = Weights(spec, torch.float32, lambda done, total: seen.append((done, total)))
    for tensor in spec.tensors:
        weights.get(tensor.name, tensor.shape)
    assert seen[-1][0] == seen[-1][1] == sum(tensor.nbytes for tensor in spec.tensors)
    assert seen == sorted(seen)


def test_broken_checkpoints_name_tensor_and_file(tmp_path: Path) -> None:
    spec, _ = save_tiny("llama", tmp_path)
    first = spec.tensors[0]
    file = spec.files[0]

    def load(changed: ModelSpec, name: str = first.name, shape: tuple[int, ...] = first.shape) -> None:
        Weights(changed, torch.float32).get(name, shape)

    def with_first(**changes: object) -> ModelSpec:
        tensor = msgspec.structs.replace(first, **changes)
        return msgspec.structs.replace(spec, tensors=(tensor,))

    with pytest.raises(WeightError, match=f"model.norm.wait is missing from {tmp_path}"):
        load(spec, "model.norm.wait")
    with pytest.raises(WeightError, match=f"{first.name} in {file}: ends at byte .* cut off"):
        load(with_first(offset=10**9))
    with pytest.raises(WeightError, match=f"{first.name} in {file}: .* bytes, but F32"):
        load(with_first(nbytes=first.nbytes - 4))
    with pytest.raises(WeightError, match="unknown tensor dtype 'Q9_Z'"):
        load(with_first(dtype="Q9_Z"))
    with pytest.raises(WeightError, match="does not fit"):
        load(spec, shape=(first.shape[0], 7))
    with pytest.raises(WeightError, match=r"cannot map the file.*"):
        load(msgspec.structs.replace(spec, files=(str(tmp_path / "gone"),)))
