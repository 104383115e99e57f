"""bfloat16 on a CPU that cannot multiply it is told at start and by the doctor, and never chosen by itself."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slipring.runtime import startup
from slipring.runtime.config import EngineConfig, resolve
from slipring.runtime.cpu_features import cpu_features, lacks_bfloat16
from slipring.runtime.doctor import Level, diagnose
from slipring.runtime.engine import Engine
from slipring.runtime.model import open_model
from tests.runtime.test_doctor import SERVER
from tests.runtime.test_engine import run

PLAIN = ("avx2", "avx512f", "fpu")


@pytest.mark.parametrize("line", ["flags\t\t: fpu avx512f avx2", "Features\t: fpu avx512f avx2"])
def test_what_the_kernel_says(tmp_path: Path, line: str) -> None:
    assert cpu_features(tmp_path) == ()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
    assert cpu_features(tmp_path) == PLAIN


@pytest.mark.parametrize(
    ("features", "lacks"),
    [(PLAIN, True), ((), False), ((*PLAIN, "amx_bf16"), False), ((*PLAIN, "avx512_bf16"), False), (("bf16",), False)],
)
def test_who_lacks_it(features: tuple[str, ...], lacks: bool) -> None:
    assert lacks_bfloat16(features) is lacks
    diagnosis = diagnose(msgspec.structs.replace(SERVER, cpu_features=features))
    notes = [found for found in diagnosis.findings if found.level is Level.NOTE and "bf16" in found.text]
    assert len(notes) == lacks and diagnosis.can_serve


@pytest.mark.parametrize("features", [PLAIN, (*PLAIN, "avx512_bf16")])
def test_auto_is_float32_on_any_cpu(features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "cpu_features", lambda: features)
    assert resolve(EngineConfig(model="smollm2"), open_model("smollm2").spec).dtype == "float32"


@pytest.mark.parametrize(
    ("dtype", "features", "told"),
    [("bfloat16", PLAIN, True), ("bfloat16", (*PLAIN, "amx_bf16"), False), ("auto", PLAIN, False)],
)
def test_the_start_says_so(dtype: str, features: tuple[str, ...], told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "cpu_features", lambda: features)
    notes: list[str] = []

    async def scenario() -> None:
        engine = Engine(EngineConfig(model="smollm2", worker_module="tests.scripted_worker", dtype=dtype))
        await engine.start(lambda event: notes.append(event.note or ""))
        await engine.stop()

    run(scenario())
    assert any("--dtype bfloat16" in note for note in notes) is told
