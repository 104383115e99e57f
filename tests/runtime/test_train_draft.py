"""What cannot be trained is refused before the model begins to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipring.runtime.train_draft import DraftOptions, TrainingError, train_draft
from tests.workers.tiny_models import save_tiny


def options(tmp_path: Path, **changes: object) -> DraftOptions:
    save_tiny("llama", tmp_path / "tiny")
    given = {
        "model": str(tmp_path / "tiny"),
        "method": "eagle",
        "output": tmp_path / "head",
        "start": None,
        "num_tokens": 1000,
        "epochs": 1,
        "vocab_size": None,
        "text": None,
        "seed": 1,
        "cpu_threads": 1,
    }
    return DraftOptions(**(given | changes))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"start": Path("no-head")}, "(?i)--from.*no such file or directory"),
        ({"start": Path("no-head"), "method": "medusa"}, "--from.*EAGLE heads only"),
        ({"start": Path("no-head"), "vocab_size": 50}, "--vocab-size.*--from"),
        ({"num_tokens": 999}, "--tokens must be at least 1000, got 999"),
        ({"epochs": 0}, "--epochs must be at least 1, got 0"),
        ({"vocab_size": -1}, "--vocab-size must be at least 1, got -1"),
        ({"seed": -1}, "--seed must be from 0 to 18446744073709551615, got -1"),
        ({"seed": 1 << 64}, "--seed must be from 0 to"),
        ({"text": Path("no-text")}, "--text no-text: No such file or directory"),
        ({"output": Path(__file__) / "head"}, "--output .*test_train_draft.py/head: Not a directory"),
        ({"output": Path("/proc/self/head")}, "--output /proc/self/head: No such file or directory"),
    ],
)
def test_what_cannot_be_trained(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    told: list[str] = []
    with pytest.raises(TrainingError, match=why):
        train_draft(options(tmp_path, **changes), lambda phase, done, total, words: told.append(phase))
    assert not told, "nothing was written"
