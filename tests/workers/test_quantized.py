"""Quantised checkpoints: logits against transformers on the dequantised weights, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from slipring.kernels.quantize_fp8 import quantize_fp8_token
from slipring.runtime.architectures import ModelError
from slipring.runtime.hf_quantization import quantization_spec
from slipring.shm.spec import ModelSpec, TensorSpec
from slipring.workers.loader import WeightError, Weights
from slipring.workers.models.llama import Linear
from slipring.workers.quantized import Fp8Weight, QuantizedLinear, dequantize_part, fuse, machine_fp8
from tests.workers import runner_rig
from tests.workers.quantized_checkpoints import AWQ, BLOCK_FP8, FORMATS, compressed_tensors, fp8, save_quantized
from tests.workers.runner_rig import Rig
from tests.workers.test_models import logits_of

TOLERANCE = {"dequantised": 5e-4, "kept int": 5e-4}
"""Largest absolute difference of logits whose standard deviation is about 10, in fp32."""
FP8_COSINE = 0.99
"""... and where activations are in fp8 too: how close the direction of the logits must be."""
INTEGER = [name for name in FORMATS if not name.startswith("fp8")]
PROMPT = torch.randint(3, 260, (50,), generator=torch.Generator().manual_seed(2)).tolist()


def kept(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A rig whose linear layers stay quantised, as on a GPU, and run the kernels' references."""
    monkeypatch.setattr(runner_rig, "Weights", lambda *args: Weights(*args, keep_quantized=True))
    rig = Rig(spec)
    layer = rig.model.layers[1]
    assert all(
        isinstance(linear.quantized, QuantizedLinear) for linear in (layer.attention.o_proj, layer.mlp.down_proj)
    )
    return rig


def expected_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0, -1]


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_dequantised_weights(name: str, tmp_path: Path) -> None:
    spec, model = save_quantized(name, tmp_path)
    assert (logits_of(Rig(spec), PROMPT) - expected_logits(model)).abs().max() < TOLERANCE["dequantised"]


@pytest.mark.parametrize("name", INTEGER)
def test_kept_integer_weights_give_the_same_logits(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    spec, model = save_quantized(name, tmp_path)
    assert (logits_of(kept(spec, monkeypatch), PROMPT) - expected_logits(model)).abs().max() < TOLERANCE["kept int"]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in INTEGER])
def test_kept_fp8_weights_give_nearly_the_same_logits(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    spec, model = save_quantized(name, tmp_path)
    ours = logits_of(kept(spec, monkeypatch), PROMPT)
    assert torch.nn.functional.cosine_similarity(ours, expected_logits(model), dim=0) > FP8_COSINE


@pytest.mark.parametrize("name", FORMATS)
def test_a_kept_layer_is_the_product_with_its_dense_weights(name: str, tmp_path: Path) -> None:
    spec, model = save_quantized(name, tmp_path)
    parts = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
    linear = Linear(Weights(spec, torch.float32, keep_quantized=True), parts, 256, 128, True)
    attention = model.model.layers[0].self_attn
    x, residual = torch.randn(5, 128), torch.randn(5, 256)
    meant = x
    if name.startswith("fp8"):
        # 128 columns: a token's scale and that of its only block are the same.
        codes, scale = quantize_fp8_token(x)
        meant = codes.float() * scale
    with torch.no_grad():
        expected = torch.cat([getattr(attention, f"{part}_proj")(meant) for part in "qkv"], 1) + residual
    torch.testing.assert_close(linear.forward(x, residual), expected, rtol=1e-5, atol=2e-5)


def test_parts_are_fused_where_no_number_changes(tmp_path: Path) -> None:
    def counts(name: str) -> list[int]:
        spec, _ = save_quantized(name, tmp_path / name)
        weights = Weights(spec, torch.float32, keep_quantized=True)
        layers = {("q_proj", "k_proj"): 192, ("k_proj", "v_proj"): 128}
        found = [
            weights.quantized([f"model.layers.0.self_attn.{part}.weight" for part in parts], (rows, 128))
            for parts, rows in layers.items()
        ]
        return [len(linear.parts) for linear in found if linear]

    assert counts("fp8-channel") == counts("fp8-tensor") == counts("awq") == counts("gptq-int8") == [1, 1]
    assert counts("fp8-blocks") == [1, 2]  # v would begin within a block
    assert counts("gptq-int4-act-order") == [2, 2]  # each in an order of its own


def test_layers_that_are_quantised_in_part_are_dequantised(tmp_path: Path) -> None:
    spec, _ = save_quantized("fp8-channel", tmp_path)
    weights = Weights(spec, torch.float32, keep_quantized=True)
    assert weights.quantized(["lm_head.weight"], (260, 128)) is None
    mixed = ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"]
    assert weights.quantized(mixed, (452, 128)) is None and weights.fused(mixed, (452, 128)).isfinite().all()


def test_mi300x_reads_the_same_numbers() -> None:
    tensors, dense = fp8(True)(torch.randn(6, 32))
    codes = tensors["weight"]
    codes[0, 0] = -0.0  # whose bits are NaN there
    dense[0, 0] = 0
    part = machine_fp8(Fp8Weight(codes, tensors["weight_scale"].float(), False), torch.float8_e4m3fnuz)
    assert part.codes.dtype == torch.float8_e4m3fnuz
    out = torch.empty(6, 32)
    dequantize_part(part, out)
    assert torch.equal(out, dense)
    assert len(fuse([part, part])) == 1


REFUSED = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes' is not supported. Supported: fp8 by"),
    ({"bits": 4}, "None is not supported"),
    (compressed_tensors("block"), "weight scales per block"),
    (compressed_tensors("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity 'sparse-24"),
    (compressed_tensors("channel") | {"config_groups": {}}, "no config_groups"),
    ({k: v for k, v in BLOCK_FP8.items() if k != "weight_block_size"}, "weight_block_size None"),
    (BLOCK_FP8 | {"weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\]"),
    (BLOCK_FP8 | {"activation_scheme": "static"}, "static e4m3 activations"),
    (BLOCK_FP8 | {"scale_fmt": "ue8m0"}, "scales of the format 'ue8m0'"),
    (AWQ | {"version": "gemv"}, "version 'gemv'"),
    (AWQ | {"zero_point": False}, "zero_point false"),
    (AWQ | {"group_size": "big"}, "Expected `int`"),
    ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "rules of its own"),
]


@pytest.mark.parametrize(("config", "sentence"), REFUSED)
def test_what_is_not_served_is_refused_by_name(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=f"^/m: .*{sentence}"):
        quantization_spec(config, "/m")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"strategy": "tensor", "dynamic": False}, "float8 activations, static per tensor"),
        ({"type": "int", "num_bits": 8}, "int8 activations"),
    ],
)
def test_static_and_integer_activations_are_refused(changes: dict[str, Any], sentence: str) -> None:
    config = compressed_tensors("channel")
    config["config_groups"]["group_0"]["input_activations"] |= changes
    with pytest.raises(ModelError, match=sentence):
        quantization_spec(config, "/m")


def test_broken_quantised_tensors_name_tensor_and_file(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj"

    def load(form: str, ending: str, **changes: object) -> None:
        spec, _ = save_quantized(form, tmp_path / form)

        def changed(tensor: TensorSpec) -> TensorSpec:
            return msgspec.structs.replace(tensor, **changes) if tensor.name == f"{name}.{ending}" else tensor

        tensors = tuple(changed(tensor) for tensor in spec.tensors)
        Weights(msgspec.structs.replace(spec, tensors=tensors), torch.float32).get(f"{name}.weight", (192, 128))

    with pytest.raises(WeightError, match=rf"{name}.qweight in .*: scales \[2, 192\] and zeros \[4, 12\] do not fit"):
        load("awq", "qzeros", shape=(4, 12))
    with pytest.raises(WeightError, match=f"tensor {name}.scales is missing"):
        load("awq", "scales", name="gone")
    with pytest.raises(WeightError, match=f"{name}.weight_scale in .*: 384 bytes, but BF16"):
        load("fp8-channel", "weight_scale", shape=(191, 1))
    with pytest.raises(WeightError, match=f"{name}.weight in .*: torch.int8"):
        load("fp8-blocks", "weight", dtype="I8")
    with pytest.raises(WeightError, match="unexpected dtype F6"):
        load("fp8-blocks", "weight", dtype="F6")


def test_a_gpu_keeps_quantised_weights_where_its_kernels_can_multiply_them(tmp_path: Path) -> None:
    """No kernel multiplies them in fp32: there they are dequantised, as on a CPU."""
    spec, _ = save_quantized("awq", tmp_path)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    assert [Weights(spec, dtype, device="cuda")._keeps_quantized for dtype in dtypes] == [True, True, False]
