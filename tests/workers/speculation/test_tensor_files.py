"""Files of draft heads."""

from __future__ import annotations

from pathlib import Path

import torch

from slipring.workers.speculation.tensor_files import CONFIG, WEIGHTS, read_tensors, write_head


def test_a_head_can_be_read_by_whoever_may_read_other_files(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("x")
    (tmp_path / "head").mkdir()
    for name in (CONFIG, WEIGHTS):  # as an older head has them
        (tmp_path / "head" / name).touch(0o600)
    write_head(tmp_path / "head", {"a": torch.arange(6.0).view(2, 3)}, {"method": "eagle"})
    modes = {
        path.stat().st_mode for path in (tmp_path / "other", tmp_path / "head" / CONFIG, tmp_path / "head" / WEIGHTS)
    }
    assert len(modes) == 1 and len(list((tmp_path / "head").iterdir())) == 2
    assert torch.equal(read_tensors(tmp_path / "head" / WEIGHTS)["a"], torch.arange(6.0).view(2, 3))
