"""`DeviceRows`: what every batch-table row's next step depends on, on the device, moved on by the steps themselves.

    block_table   [num_rows, max_blocks] int32   loaded from the table at admission, appended to by steps
    last_token    [num_rows] int64               drawn last; the input of the row's next decode step
    num_computed  [num_rows] int32               positions whose keys and values are in the pool

The host keeps generations and output counts beside them (`workers/rows.py`): those it can know without waiting.
Everything is enqueued on one stream, so a step sees what the steps before it left, whether or not they are back.
"""

from __future__ import annotations

import torch

from slipring.kernels.row_state import append_blocks, assign
from slipring.shm.table import BatchTable
from slipring.shm.wire import StepFlag, StepInputView
from slipring.workers.cuda.step_mirror import StepMirror
from slipring.workers.rows import Rows


class DeviceRows:
    def __init__(self, table: BatchTable, device: torch.device) -> None:
        shape = table.shape
        self.host = Rows(table)
        self.num_rows = shape.num_rows
        self.block_table = torch.zeros((shape.num_rows, shape.max_blocks), dtype=torch.int32, device=device)
        self.last_token = torch.zeros(shape.num_rows, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)
        self._table = table
        self._shared_blocks = torch.from_numpy(table.block_table)

    def update(self, step: StepInputView, mirror: StepMirror, new: list[int]) -> None:
        """Block appends, and the entries `new` (indices into the step's rows). Raises RuntimeError as Rows.check."""
        num_rows, num_appends = int(step.header[step.NUM_ROWS]), int(step.header[step.NUM_APPENDS])
        for i in new:
            self._admit(int(step.rows[i]), int(step.generation[i]))
        self.host.check(step.rows[:num_rows], step.generation[:num_rows])
        if num_appends:
            appends = (mirror.append_rows, mirror.append_index, mirror.append_blocks)
            append_blocks(self.block_table, *(section[:num_appends] for section in appends))
        if new:
            known = (mirror.flags[:num_rows] & int(StepFlag.NEW)) == 0
            assign(self.num_computed, mirror.rows[:num_rows].masked_fill(known, -1), mirror.start[:num_rows])

    def warm_up(self) -> None:
        """Launch, for padding, what only some steps launch."""
        nothing = torch.full((1,), -1, dtype=torch.int32, device=self.block_table.device)
        append_blocks(self.block_table, nothing, nothing, nothing)
        assign(self.num_computed, nothing, nothing)

    def _admit(self, row: int, generation: int) -> None:
        self.host.admit(row, generation)
        # Straight from the shared table: the row is the admission's until the step is back.
        num_blocks = int(self._table.num_blocks[row])
        self.block_table[row, :num_blocks].copy_(self._shared_blocks[row, :num_blocks], non_blocking=True)
