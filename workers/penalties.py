"""Token counts of the rows that asked for penalties, and of no others.

Each such row owns a slot of two pools, [num_slots, vocab]; pools grow by doubling. A slot goes back when its row is
admitted anew. Counts follow the tokens as they are drawn, so they never wait for the engine.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class PenaltyCounts:
    """Invariant: `slot[row] >= 0` exactly for rows whose present admission has penalties."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.slot: NDArray[np.int64] = np.full(num_rows, -1, np.int64)
        self._free: list[int] = []
        self._prompt_mask = torch.zeros((0, vocab_size), dtype=torch.bool)
        self._output_counts = torch.zeros((0, vocab_size), dtype=torch.int32)

    def admit(self, row: int, wanted: bool, prompt: NDArray[np.int32], outputs: NDArray[np.int32]) -> None:
        """Forget the row's last admission; when penalties are wanted, count its prompt and outputs so far."""
        if self.slot[row] >= 0:
            self._free.append(int(self.slot[row]))
            self.slot[row] = -1
        if not wanted:
            return
        slot = self._take_slot()
        self.slot[row] = slot
        self._prompt_mask[slot] = False
        self._prompt_mask[slot, torch.from_numpy(prompt.astype(np.int64))] = True
        counts = np.bincount(outputs, minlength=self._output_counts.shape[1]).astype(np.int32)
        self._output_counts[slot] = torch.from_numpy(counts)

    def count(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """These tokens were drawn, each for the row beside it; a row may stand here several times."""
        slots = self.slot[rows]
        if len(at := np.flatnonzero(slots >= 0)):
            index = torch.from_numpy(slots[at]), torch.from_numpy(tokens[at])
            self._output_counts.index_put_(index, torch.ones((), dtype=torch.int32), accumulate=True)

    def take(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """(prompt_mask [P, vocab] bool, output_counts [P, vocab] int32) of rows with penalties."""
        slots = torch.from_numpy(self.slot[rows])
        return self._prompt_mask[slots], self._output_counts[slots]

    def _take_slot(self) -> int:
        if not self._free:
            old = self._prompt_mask.shape[0]
            extra = max(4, old)
            self._prompt_mask = torch.cat((self._prompt_mask, self._prompt_mask.new_zeros((extra, self._vocab))))
            self._output_counts = torch.cat((self._output_counts, self._output_counts.new_zeros((extra, self._vocab))))
            self._free.extend(range(old, old + extra))
        return self._free.pop()

    @property
    def _vocab(self) -> int:
        return self._prompt_mask.shape[1]
