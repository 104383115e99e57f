"""Two models whose KV may differ never see each other's pages, and one that was moved elsewhere finds its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipring.runtime.tiers import identity
from slipring.runtime.tiers.identity import IMMATERIAL, model_identity
from slipring.shm.pages import PageShape
from slipring.shm.spec import ModelSpec, QuantizationSpec, SamplingDefaults

FIELDS = ModelSpec.__struct_fields__


def identity_of(spec: ModelSpec, max_model_len: int = 512, **changes: Any) -> bytes:
    changed = msgspec.structs.replace(spec, **changes)
    return model_identity(changed, PageShape(4, 16, 2, 128), "float32", max_model_len)


def another(name: str, value: Any, spec: ModelSpec) -> Any:
    if name == "files":  # the same bytes at another place
        copy = Path(spec.path) / "moved.safetensors"
        copy.write_bytes(Path(value[0]).read_bytes())
        return (str(copy),)
    if name == "tensors":
        return (msgspec.structs.replace(value[0], name="another"), *value[1:])
    special = {
        "quantization": QuantizationSpec(method="awq", bits=4),
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "sampling_defaults": SamplingDefaults(top_k=3),
        "bos_token_id": 7,
        "eos_token_ids": (7, 8),
    }
    if name in special:
        return special[name]
    return value + "x" if isinstance(value, str) else not value if isinstance(value, bool) else value * 2


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_counts_or_is_said_not_to(spec: ModelSpec, name: str) -> None:
    value = another(name, getattr(spec, name), spec)
    assert value != getattr(spec, name)
    assert (identity_of(spec, **{name: value}) == identity_of(spec)) == (name in IMMATERIAL)


def test_what_is_said_not_to_count_are_fields() -> None:
    assert set(FIELDS) >= IMMATERIAL


@pytest.mark.parametrize(
    ("scaling", "depends"),
    [
        (None, False),
        ({"rope_type": "yarn", "factor": 2.0}, False),
        ({"type": "linear", "factor": 2.0}, False),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        ({"type": "dynamic", "factor": 2.0}, True),
        ({"rope_type": "of another day"}, True),
    ],
)
def test_the_context_counts_where_the_rotation_depends_on_it(
    spec: ModelSpec, scaling: dict[str, Any] | None, depends: bool
) -> None:
    longer = identity_of(spec, 4096, rope_scaling=scaling)
    assert (longer != identity_of(spec, 2048, rope_scaling=scaling)) == depends
    trained, shorter = (identity_of(spec, context, rope_scaling=scaling) for context in (512, 256))
    assert trained == shorter, "no shorter context than the trained one changes the angles"


def test_layouts_are_told_apart(spec: ModelSpec) -> None:
    shape = PageShape(4, 16, 2, 128)
    layouts = [(shape, "float32"), (shape, "bfloat16"), (PageShape(4, 8, 4, 128), "float32")]
    layouts.append((PageShape(4, 16, 4, 64), "float32"))
    assert len({model_identity(spec, *layout, 512) for layout in layouts}) == len(layouts)


def test_versions_are_told_apart(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity_of(spec)
    monkeypatch.setattr(identity, "PAGE_FORMAT", b"SLIPKV\x00\xff")
    assert identity_of(spec) != before


def flipped(spec: ModelSpec, tensor: int, at: int) -> tuple[str]:
    """The weights' file, but for one bit."""
    found = spec.tensors[tensor]
    data = bytearray(Path(spec.files[0]).read_bytes())
    data[found.offset + at] ^= 1
    copy = Path(spec.path) / "flipped.safetensors"
    copy.write_bytes(data)
    return (str(copy),)


def test_a_single_bit_of_the_weights_counts(spec: ModelSpec) -> None:
    """Where only the last rows of an embedding were trained, say."""
    before = identity_of(spec)
    for tensor, found in enumerate(spec.tensors):
        assert identity_of(spec, files=flipped(spec, tensor, found.nbytes - 1)) != before, found.name


def test_of_very_large_models_each_tensor_is_sampled_all_along(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = sum(tensor.nbytes for tensor in spec.tensors)
    monkeypatch.setattr(identity, "_PIECE_BYTES", 64)
    monkeypatch.setattr(identity, "_BUDGET_BYTES", -(-total // 10))
    before = identity_of(spec)
    stride = 64 * 10
    for tensor, found in enumerate(spec.tensors):
        for at in {0, (found.nbytes - 1) // stride // 2 * stride, (found.nbytes - 1) // stride * stride}:
            assert identity_of(spec, files=flipped(spec, tensor, at)) != before, (found.name, at)
    assert identity_of(spec, files=flipped(spec, 0, 64)) == before, "and not whole"
