"""What the worker itself knows of each batch-table row: structure-of-arrays of size num_rows, on the host.

Loaded from the table in the step that carries the row's NEW flag, then kept by the worker: block appends arrive in
steps, and the last drawn token, its position and the number of outputs move as tokens are drawn (the engine learns of
them one or more steps later). The table's own columns are not looked at again, except tokens of later prompt chunks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipring.shm.table import BatchTable


class Rows:
    """Row state that the forward pass needs; the sampler keeps its own columns."""

    def __init__(self, table: BatchTable) -> None:
        shape = table.shape
        self._table = table
        self.block_table: NDArray[np.int32] = np.zeros((shape.num_rows, shape.max_blocks), np.int32)
        self.generation: NDArray[np.int32] = np.full(shape.num_rows, -1, np.int32)
        self.last_token: NDArray[np.int64] = np.zeros(shape.num_rows, np.int64)
        self.position: NDArray[np.int64] = np.zeros(shape.num_rows, np.int64)
        """Of the last drawn token; it is the next one to be computed."""
        self.limit: NDArray[np.int64] = np.zeros(shape.num_rows, np.int64)
        """Length at which the row's request ends."""
        self.num_outputs: NDArray[np.int32] = np.zeros(shape.num_rows, np.int32)

    def append_blocks(self, rows: NDArray[np.int32], index: NDArray[np.int32], blocks: NDArray[np.int32]) -> None:
        """block table [rows, index] = blocks, all [num_appends]."""
        self.block_table[rows, index] = blocks

    def admit(self, row: int, generation: int) -> None:
        """(Re)load a row that a step names as NEW."""
        table = self._table
        num_blocks = table.num_blocks[row]
        self.block_table[row, :num_blocks] = table.block_table[row, :num_blocks]
        self.generation[row] = generation
        self.limit[row] = table.limit[row]
        self.num_outputs[row] = table.num_known[row] - table.num_prompt[row]

    def draw(self, rows: NDArray[np.int64], position: NDArray[np.int64], tokens: NDArray[np.int64], count: NDArray):
        """`count` tokens were drawn for each of these rows, the last of them `tokens` at `position`."""
        self.last_token[rows] = tokens
        self.position[rows] = position
        self.num_outputs[rows] += count

    def check(self, rows: NDArray[np.int32], generation: NDArray[np.int32]) -> None:
        """Raises RuntimeError when a step names an admission that this worker was never told of."""
        wrong = self.generation[rows] != generation
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise RuntimeError(
                f"step names row {rows[at]} generation {generation[at]}, the worker has {self.generation[rows[at]]}"
            )
