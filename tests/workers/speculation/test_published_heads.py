"""EAGLE heads in their authors' layouts, against their computation written down plainly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from slipring.shm.spec import ModelSpec
from slipring.workers.speculation.chain_attention import chain_attention
from slipring.workers.speculation.eagle import EagleProposer, Target
from slipring.workers.speculation.head_files import load_head
from tests.workers.runner_rig import Rig
from tests.workers.tiny_models import save_tiny

NUM_DRAFT_TOKENS, MIDDLE, THETA, EPS, LENGTH = 40, 24, 5000.0, 1e-4, 9
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


def tensors_of(spec: ModelSpec, eagle3: bool, layer: str, num_taps: int = 2) -> Tensors:
    generator, hidden = torch.Generator().manual_seed(2), spec.hidden_size
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    reads = hidden * (2 if eagle3 else 1)
    shapes = {
        "fc.weight": (hidden, hidden * (num_taps if eagle3 else 2)),
        f"{layer}.self_attn.q_proj.weight": (heads, reads),
        f"{layer}.self_attn.k_proj.weight": (kv_heads, reads),
        f"{layer}.self_attn.v_proj.weight": (kv_heads, reads),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads),
        f"{layer}.mlp.gate_proj.weight": (MIDDLE, hidden),
        f"{layer}.mlp.up_proj.weight": (MIDDLE, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, MIDDLE),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        "embed_tokens.weight": (spec.vocab_size, hidden),
    }
    if eagle3:
        shapes |= {
            f"{layer}.hidden_norm.weight": (hidden,),
            f"{layer}.input_layernorm.weight": (hidden,),
            "norm.weight": (hidden,),
            "lm_head.weight": (NUM_DRAFT_TOKENS, hidden),
        }
    else:
        shapes["fc.bias"] = (hidden,)
    found = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    if eagle3:
        chosen = torch.arange(NUM_DRAFT_TOKENS) * 5 + 3
        found["d2t"] = chosen - torch.arange(NUM_DRAFT_TOKENS)
        found["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return found


def save(path: Path, tensors: Tensors, pickled: bool = False, **config: object) -> Path:
    path.mkdir()
    if pickled:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors")
    known = {"rope_theta": THETA, "rms_norm_eps": EPS, "hidden_act": "silu", "num_hidden_layers": 1}
    (path / "config.json").write_text(json.dumps(known | config))
    return path


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def plain_layer(spec: ModelSpec, t: Tensors, layer: str, x: Tensor, read: Tensor) -> Tensor:
    """One Llama layer over a whole sequence [T, hidden], as in Hugging Face's code."""
    dim, length = spec.head_dim, len(x)
    inverse = THETA ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.outer(torch.arange(length), inverse).repeat(1, 2)

    def heads_of(name: str, num: int, turn: bool) -> Tensor:
        heads = F.linear(read, t[f"{layer}.self_attn.{name}_proj.weight"]).view(length, num, dim).transpose(0, 1)
        if turn:
            low, high = heads[..., : dim // 2], heads[..., dim // 2 :]
            heads = heads * angles.cos() + torch.cat((-high, low), -1) * angles.sin()
        return heads.repeat_interleave(spec.num_heads // num, 0)

    query, key = heads_of("q", spec.num_heads, True), heads_of("k", spec.num_kv_heads, True)
    scores = query @ key.transpose(1, 2) / dim**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    mixed = (scores.softmax(-1) @ heads_of("v", spec.num_kv_heads, False)).transpose(0, 1).flatten(1)
    x = x + F.linear(mixed, t[f"{layer}.self_attn.o_proj.weight"])
    y = norm(x, t[f"{layer}.post_attention_layernorm.weight"])
    gated = F.silu(F.linear(y, t[f"{layer}.mlp.gate_proj.weight"])) * F.linear(y, t[f"{layer}.mlp.up_proj.weight"])
    return x + F.linear(gated, t[f"{layer}.mlp.down_proj.weight"])


def ours(spec: ModelSpec, path: Path, embedded: Tensor, normed: Tensor, taps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(features, scores) of a whole sequence."""
    head = load_head(path, spec, 64)
    output = {"output": torch.eye(spec.hidden_size)} | head.weights
    head.weights.update(output)
    assert head.cos_sin is not None
    attend = chain_attention(spec, head.cos_sin[:LENGTH], [LENGTH], [])
    feature = head.forward(embedded, head.first(normed, taps), attend)
    return feature, head.scores(feature)


def inputs(spec: ModelSpec) -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    embedded, normed, *taps = (torch.randn(LENGTH, spec.hidden_size, generator=generator) for _ in range(4))
    return embedded, normed, taps


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_eagle(spec: ModelSpec, tmp_path: Path, pickled: bool, has_norm: bool) -> None:
    t = tensors_of(spec, False, "layers.0")
    if has_norm:
        t["layers.0.input_layernorm.weight"] = torch.rand(spec.hidden_size) + 0.5
    path = save(tmp_path / "head", t, pickled)
    embedded, normed, taps = inputs(spec)
    x = F.linear(torch.cat((embedded, normed), 1), t["fc.weight"], t["fc.bias"])
    read = norm(x, t["layers.0.input_layernorm.weight"]) if has_norm else x
    expected = plain_layer(spec, t, "layers.0", x, read)
    feature, scores = ours(spec, path, embedded, normed, taps)
    assert (feature - expected).abs().max() < 1e-3 and torch.equal(feature, scores)
    assert torch.equal(load_head(path, spec, 64).token_ids, torch.arange(spec.vocab_size))


@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
def test_eagle_3(spec: ModelSpec, tmp_path: Path, layer: str) -> None:
    t = tensors_of(spec, True, layer)
    path = save(tmp_path / "head", t, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]})
    embedded, normed, taps = inputs(spec)
    feature = F.linear(torch.cat(taps, 1), t["fc.weight"])
    read = torch.cat(
        (norm(embedded, t[f"{layer}.input_layernorm.weight"]), norm(feature, t[f"{layer}.hidden_norm.weight"])), 1
    )
    expected = plain_layer(spec, t, layer, feature, read)
    found, scores = ours(spec, path, embedded, normed, taps)
    assert (found - expected).abs().max() < 1e-3
    wanted = F.linear(norm(expected, t["norm.weight"]), t["lm_head.weight"])
    assert (scores - wanted).abs().max() < 1e-3
    head = load_head(path, spec, 64)
    assert head.taps == (1, 2) and head.token_ids.tolist() == [i * 5 + 3 for i in range(NUM_DRAFT_TOKENS)]


@pytest.mark.parametrize("eagle3", [False, True], ids=["eagle", "eagle3"])
def test_served_tokens_are_the_same(spec: ModelSpec, tmp_path: Path, eagle3: bool) -> None:
    t = tensors_of(spec, eagle3, "midlayer" if eagle3 else "layers.0")
    path = save(tmp_path / "head", t, eagle_aux_hidden_state_layer_ids=[1, 2])
    answers = []
    for drafts in (0, 3):
        rig = Rig(spec, num_blocks=64, max_draft=drafts)
        if drafts:
            runner = rig.runner
            target = Target(spec, rig.model, rig.kv, rig.table, runner.rows, runner.builder, runner.sampler)
            runner.proposer = EagleProposer(target, load_head(path, spec, 128))
        sequences = [rig.admit(list(range(3, 3 + size))) for size in (4, 11)]
        rig.generate(sequences, 12)
        answers.append([sequence.outputs[:12] for sequence in sequences])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fc.weight": None}, "fc.weight is missing"),
        ({"fc.weight": torch.zeros(3, 4)}, r"fc.weight is \[3, 4\], this model needs"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(2)}, r"layers.1.mlp.up_proj.weight: not part of"),
        ({"layers.0.self_attn.k_proj.weight": torch.zeros(8, 8)}, "k_proj.weight is"),
        ({"layers.0.self_attn.q_proj.bias": torch.zeros(64)}, "k_proj.bias is missing"),
    ],
)
def test_what_does_not_fit_is_named(
    spec: ModelSpec, tmp_path: Path, change: dict[str, Tensor | None], words: str
) -> None:
    t = tensors_of(spec, False, "layers.0") | change
    path = save(tmp_path / "head", {name: tensor for name, tensor in t.items() if tensor is not None})
    with pytest.raises(ValueError, match=words):
        load_head(path, spec, 64)


def test_layers_and_tokens_must_exist(spec: ModelSpec, tmp_path: Path) -> None:
    t = tensors_of(spec, True, "midlayer")
    for name, layers in (("deep", [1, spec.num_layers + 1]), ("falling", [2, 1])):
        with pytest.raises(ValueError, match="no rising layers"):
            load_head(save(tmp_path / name, t, eagle_aux_hidden_state_layer_ids=layers), spec, 64)
    t["d2t"] = t["d2t"] + spec.vocab_size
    with pytest.raises(ValueError, match="guesses token"):
        load_head(save(tmp_path / "beyond", t, eagle_aux_hidden_state_layer_ids=[1, 2]), spec, 64)


def test_a_pickle_is_not_run(spec: ModelSpec, tmp_path: Path) -> None:
    path = save(tmp_path / "head", {}, pickled=True)
    torch.save({"fc.weight": Path("/")}, path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="more than tensors"):
        load_head(path, spec, 64)
