"""What cannot be trained is refused before the model begins to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipring.runtime.train_draft import DraftOptions, TrainingError, train_draft
from tests.workers.tiny_models import save_tiny

NO_HEAD, NO_MEDUSA = "no such file or directory", "EAGLE heads only"


@pytest.mark.parametrize(("method", "why"), [("eagle", NO_HEAD), ("medusa", NO_MEDUSA)])
def test_a_head_to_go_on_with_is_looked_at_first(tmp_path: Path, method: str, why: str) -> None:
    save_tiny("llama", tmp_path / "tiny")
    options = DraftOptions(
        model=str(tmp_path / "tiny"),
        method=method,
        output=tmp_path / "head",
        start=tmp_path / "no-head",
        num_tokens=100,
        epochs=1,
        vocab_size=50,
        text=None,
        seed=1,
        cpu_threads=1,
    )
    told: list[str] = []
    with pytest.raises(TrainingError, match=f"--from.*(?i:{why})"):
        train_draft(options, lambda phase, done, total, words: told.append(phase))
    assert not told, "nothing was written"
