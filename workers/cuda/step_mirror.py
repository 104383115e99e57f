"""`StepMirror`: the StepInput at hand, on the device, section by section, by one copy from its registered ring slot.

The device reads counts from it too (`header`), so a captured graph needs no other input than this copy. There is one
mirror: steps run in order, and each overwrites the last one's. A slot must not change before its copy is done, which
its reader warrants by giving it back only after the output is published.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipring.shm.wire import StepInputView, StepShape

_SECTIONS = (
    "header", "rows", "generation", "start", "num_tokens", "num_draft", "flags",
    "append_rows", "append_index", "append_blocks",
)  # fmt: skip


class StepMirror:
    """Sections are int32 tensors named as in `StepInputView`."""

    header: Tensor
    rows: Tensor
    start: Tensor
    num_tokens: Tensor
    flags: Tensor
    append_rows: Tensor
    append_index: Tensor
    append_blocks: Tensor

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self._data = torch.zeros(shape.input_bytes // 4, dtype=torch.int32, device=device)
        self._slots: dict[int, tuple[StepInputView, Tensor]] = {}
        """By the view's id; the view is kept so that no other can have it."""
        model = StepInputView(memoryview(bytearray(shape.input_bytes)), shape)
        for name in _SECTIONS:
            section = getattr(model, name)
            begin = (section.ctypes.data - model.header.ctypes.data) // 4
            setattr(self, name, self._data[begin : begin + len(section)])

    def load(self, step: StepInputView) -> None:
        """Enqueue the copy of a step."""
        self._data.copy_(self._slot(step), non_blocking=True)

    def clear(self) -> None:
        """A step without entries."""
        self._data.zero_()

    def _slot(self, step: StepInputView) -> Tensor:
        """The slot's words as one tensor; kept, because a slot comes round every few steps."""
        if (known := self._slots.get(id(step))) is None:
            words = np.lib.stride_tricks.as_strided(step.header, (self._data.numel(),), (4,))
            self._slots[id(step)] = known = (step, torch.from_numpy(words))
        return known[1]
