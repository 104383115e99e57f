"""The GGUF reader against the `gguf` package as oracle, and against damaged files."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipring.runtime.gguf import GGML_TYPES, GgufError, GgufFile, read_gguf
from slipring.runtime.model import resolve_model


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_float32("a.f32", 1e-5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "héllo")
    writer.add_int64("a.i64", -5)
    writer.add_array("a.strings", ["", "b", "çç"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, 2.0])
    writer.add_tensor("one", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("two", np.arange(5, dtype=np.float16))
    writer.add_tensor("three", np.zeros((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf").read_bytes()


def parse(data: bytes) -> GgufFile:
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        return read_gguf(file.name)


def test_types_are_those_of_the_gguf_package() -> None:
    assert {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()} == GGML_TYPES


def test_metadata_and_tensors(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    parsed = read_gguf(path)
    metadata = parsed.metadata
    assert parsed.version == 3
    assert metadata["general.architecture"] == "llama"
    assert (metadata["a.u32"], metadata["a.i64"], metadata["a.bool"]) == (7, -5, True)
    assert metadata["a.f32"] == float(np.float32(1e-5))
    assert metadata["a.text"] == "héllo"
    strings = metadata["a.strings"]
    assert list(strings) == ["", "b", "çç"] == strings[:]
    assert [strings[i] for i in range(len(strings))] == list(strings)
    assert strings[-1] == "çç"
    with pytest.raises(IndexError):
        strings[3]
    assert metadata["a.ints"].tolist() == [1, -2, 3]
    assert metadata["a.floats"].tolist() == [0.5, 2.0]
    oracle = gguf.GGUFReader(path)
    for tensor, expected in zip(parsed.tensors, oracle.tensors, strict=True):
        assert tensor.name == expected.name
        assert tensor.shape == tuple(int(n) for n in expected.shape)[::-1]
        assert tensor.dtype == expected.tensor_type.name
        assert (tensor.offset, tensor.nbytes) == (expected.data_offset, expected.n_bytes)


def test_smollm2_equals_the_gguf_package() -> None:
    spec = resolve_model("smollm2")
    parsed = read_gguf(spec.path)
    oracle = gguf.GGUFReader(spec.path)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert list(parsed.metadata[key]) == oracle.fields[key].contents()
    got = [(t.name, t.shape, t.dtype, t.offset, t.nbytes) for t in spec.tensors]
    assert got == [
        (t.name, tuple(int(n) for n in t.shape)[::-1], t.tensor_type.name, t.data_offset, t.n_bytes)
        for t in oracle.tensors
    ]


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_an_error_or_a_file(small: bytes, data: st.DataObject) -> None:
    damaged = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        patch = data.draw(
            st.binary(min_size=1, max_size=8)
            | st.sampled_from([b"\xff" * 8, struct.pack("<Q", 1 << 62), struct.pack("<Q", 1 << 31), bytes(8)])
        )
        damaged[position : position + len(patch)] = patch
    end = data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))
    try:
        parsed = parse(bytes(damaged[:end]))
    except GgufError as error:
        assert str(error).endswith(".")
    else:
        assert all(tensor.offset + tensor.nbytes <= end for tensor in parsed.tensors)
        for value in parsed.metadata.values():
            repr(list(value)) if hasattr(value, "__len__") else repr(value)


def test_every_truncation_is_an_error(small: bytes) -> None:
    for end in range(len(small) - 200, 0, -7):
        with pytest.raises(GgufError):
            parse(small[:end])


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 1) + b"\x05"


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF\x00\x00\x00\x03" + bytes(40), "big-endian"),
        (b"GGUF\x01\x00\x00\x00" + bytes(40), "version 1"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60) + bytes(40), "claims"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0) + bytes(40), "claims"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 8, 1 << 40)), "array of"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 8, 1 << 20)), "claims"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry(b"k", 9, nested(100)), "depth"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry(b"k", 77, bytes(8)), "unknown type 77"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry(b"\xff", 0, b"1"), "UTF-8"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + entry(b"k", 0, b"1") * 2, "twice"),
        (b"", "too short"),
    ],
)
def test_the_sentence_names_the_problem(head: bytes, sentence: str) -> None:
    with pytest.raises(GgufError, match=sentence):
        parse(head)


def test_nested_arrays_are_read() -> None:
    head = struct.pack("<4sIQQ", b"GGUF", 2, 0, 1) + entry(b"k", 9, nested(2))
    assert parse(head).metadata["k"][0][0].tolist() == [5]


def test_not_a_regular_file() -> None:
    with pytest.raises(GgufError, match="not a regular file"):
        read_gguf("/dev/null")
