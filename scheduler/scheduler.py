"""The policy: which rows compute how many tokens in the next step, and what a returned step means.

`schedule(view)` writes a StepInput straight into a ring slot; `update(view)` takes a StepOutput. Both are pure and
synchronous, and any number of steps may be in flight between them. Requests have no prefill or decode phase, only
two counts that chase the number of tokens:

    0 ........ num_computed ........ num_scheduled ........ num_tokens (known) .... limit
               returned              sent

Order of a step: rows in plain decode (dense columns, see `decode_rows.py`), then chunks of prompts that are under
way, then admissions, within `max_num_seqs` rows and `max_num_batched_tokens` tokens.

A row in plain decode needs no token from here: the worker still has the one it drew. So decode runs ahead of what
is known by as many steps as are in flight, and whatever comes back for an admission that has ended in the meantime
is dropped by its generation. There are no placeholders.

Who owns what: blocks belong to `BlockPool`, rows to `RowAllocator`; a running request holds one row and the blocks
in that row's block table, both from admission to `_end_row`, which is the only place that gives them back.
Admission is match → reserve → commit; until the commit nothing has changed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.config import SchedulerConfig
from slipring.scheduler.decode_rows import NEVER, DecodeRows, PendingAppends
from slipring.scheduler.request import FinishReason, Request, RequestStatus
from slipring.scheduler.rows import RowAllocator
from slipring.scheduler.waiting import WaitingQueue
from slipring.shm.table import BatchTable
from slipring.shm.wire import StepFlag, StepInputView, StepOutputView

_LOOK_AHEAD = 8
"""A decode row gets its next block at most so many steps before it needs it."""
_LOOK_EVERY = 4
"""`settle` looks for such rows when somebody may need a block within so many steps; more than the pipeline's depth."""
_DECODE_FLAGS = int(StepFlag.SAMPLE | StepFlag.LAST_TOKEN)


_Int32Array = NDArray[np.int32]
_Entries = NDArray[np.intp] | slice
_ALL = slice(None)
"""Every entry of a step, as an index that copies nothing."""


class ProtocolError(Exception):
    """A StepOutput that does not answer the oldest step in flight."""


@dataclass(slots=True)
class Counters:
    """Only ever grow."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""


@dataclass(slots=True)
class Step:
    """A step in flight: a summary for pacing, and the slot's view, which stays valid until the step is back."""

    step_id: int
    view: StepInputView
    num_rows: int
    num_decode: int
    num_chunk_tokens: int


@dataclass(slots=True)
class Returned:
    """What `update` learned: token `tokens[i]` was drawn for `requests[i]`, in entry `entries[i]` of the output."""

    step: Step
    requests: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    finished: list[tuple[Request, FinishReason, int | None]] = field(default_factory=list)
    """(request, reason, the token id that stopped it)."""


class Scheduler:
    def __init__(self, config: SchedulerConfig, table: BatchTable, vocab_size: int) -> None:
        self.config = config
        self.table = table
        self.pool = BlockPool(config.num_blocks)
        self.rows = RowAllocator(table.generation)
        self.waiting = WaitingQueue(config.policy, config.priority_age_s)
        self.decode = DecodeRows(config.max_num_seqs, config.num_rows)
        self.counters = Counters()
        self.mixed_chunk = config.max_mixed_chunk
        """Most prompt tokens beside decode rows; the loop lowers it to hold an inter-token-latency target."""
        self._prefilling: list[Request] = []
        self._in_flight: deque[Step] = deque()
        self._next_step_id = 0
        # Columns by row. num_scheduled is kept for rows in prefill only; a decode row's is its dense `start`.
        num_rows = config.num_rows
        self._request_of: list[Request | None] = [None] * num_rows
        self._num_tokens = np.zeros(num_rows, np.int32)
        self._num_computed = np.zeros(num_rows, np.int32)
        self._num_scheduled = np.zeros(num_rows, np.int32)
        self._num_hashed = np.zeros(num_rows, np.int32)
        self._limit = np.zeros(num_rows, np.int32)
        self._num_blocks = np.zeros(num_rows, np.int32)
        self._pending = PendingAppends(config.max_num_seqs)
        self._flat_block_table = table.block_table.reshape(-1)
        self._stop_uses = np.zeros(vocab_size, np.int32)
        self._block_shift = config.block_size.bit_length() - 1
        self._to_index: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]] = []
        """(rows, generations, full blocks now) of returned steps, still to be hashed."""

    # --- requests come and go -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request in line. It must fit: limit <= max_model_len <= the pool."""
        request.key = self.waiting.key(request)
        self.waiting.push(request)

    def abort(self, request: Request) -> bool:
        """End a request wherever it is; False when it had ended already. In-flight results will be dropped."""
        if request.status is RequestStatus.FINISHED:
            return False
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        else:
            self._end_row(request)
        request.status = RequestStatus.FINISHED
        return True

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return self.config.num_rows - self._request_of.count(None)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Something could be scheduled, now or once blocks or rows come back."""
        return bool(self.decode.num or self._prefilling or len(self.waiting))

    # --- one step out ---------------------------------------------------------------------------------------

    def schedule(self, view: StepInputView) -> Step | None:
        """Decide the next step and write it to `view`; None when no row can do anything now."""
        decode = self.decode
        preemptions = self.counters.num_preemptions
        if decode.done_in <= 0:
            for row in decode.done_rows():
                decode.remove(row)
        num_appends = self._pending.drain(view) if self._pending.count else 0
        if decode.grow_in <= 0:
            num_appends = self._grow(view, num_appends)
        num = decode.num
        view.rows[:num] = decode.row[:num]
        view.generation[:num] = decode.generation[:num]
        view.start[:num] = decode.start[:num]
        view.num_tokens[:num] = 1
        view.flags[:num] = _DECODE_FLAGS
        decode.advance()
        num_rows, num_chunk_tokens = num, 0
        if self._prefilling or len(self.waiting):
            may_admit = self.counters.num_preemptions == preemptions
            num_rows, num_chunk_tokens = self._schedule_chunks(view, num, may_admit)
        if num_rows == 0:
            return None
        return self._seal(view, num_rows, num, num_appends, num_chunk_tokens)

    def _seal(self, view: StepInputView, num_rows: int, num_decode: int, num_appends: int, chunk: int) -> Step:
        header = view.header
        header[StepInputView.NUM_ROWS] = num_rows
        header[StepInputView.NUM_DECODE] = num_decode
        header[StepInputView.NUM_APPENDS] = num_appends
        header[StepInputView.NUM_TOKENS] = num_decode + chunk
        step = Step(self._next_step_id, view, num_rows, num_decode, chunk)
        self._next_step_id += 1
        self._in_flight.append(step)
        self.counters.num_steps += 1
        return step

    def _grow(self, view: StepInputView, at: int) -> int:
        """Give a block to every decode row that needs one now, which `settle` could not give it before.

        Preempts when the pool is empty. Writes its appends from entry `at` on; returns how many there are then.
        """
        decode = self.decode
        while True:
            left = decode.grow_at[: decode.num] - decode.start[: decode.num]
            due = (left <= 0).nonzero()[0]
            blocks = self.pool.pop(due.size)
            if blocks is not None:
                break
            # An append of the victim may stand in `view` already. It can do no harm: a step that preempts admits
            # nobody, so the row is nobody's when the worker reads it.
            self._preempt(self._victim())
        decode.grow_in = 1
        rows, index = self._append_blocks(due, blocks)
        end = at + due.size
        view.append_rows[at:end] = rows
        view.append_index[at:end] = index
        view.append_blocks[at:end] = blocks
        return end

    def _grow_ahead(self) -> None:
        """Give blocks to decode rows that will need one within a few steps, while nobody waits for the scheduler."""
        decode = self.decode
        left = decode.grow_at[: decode.num] - decode.start[: decode.num]
        due = (left < _LOOK_AHEAD).nonzero()[0]
        blocks = self.pool.pop(due.size)
        if blocks is None:
            return  # `_grow` will give what is needed when it is needed, to those who need it most
        # Whoever got none can go on for so long, and whoever got one has a whole block.
        decode.grow_in = min(_LOOK_AHEAD, self.config.block_size)
        self._pending.add(*self._append_blocks(due, blocks), blocks)

    def _append_blocks(self, due: NDArray[np.intp], blocks: NDArray[np.int32]) -> tuple[_Int32Array, _Int32Array]:
        """Enter blocks into the table; returns (rows, index in their block tables)."""
        decode = self.decode
        rows = decode.row[due]
        index = self._num_blocks[rows]
        self._flat_block_table[rows * self.table.shape.max_blocks + index] = blocks
        num_blocks = index + 1
        self._num_blocks[rows] = num_blocks
        border = num_blocks << self._block_shift
        border[border >= decode.last[due]] = NEVER
        decode.grow_at[due] = border
        return rows, index

    # --- prompts: chunks and admissions ---------------------------------------------------------------------

    def _schedule_chunks(self, view: StepInputView, at: int, may_admit: bool) -> tuple[int, int]:
        """Write chunks from entry `at` on; returns (entries now, prompt tokens).

        A step that preempted admits nobody (`may_admit`), or it would take back what it has just given up.
        """
        budget = self.config.max_num_batched_tokens - at
        if at:
            budget = min(budget, max(1, self.mixed_chunk))
        total = budget
        for request in self._prefilling.copy():
            if budget <= 0 or at >= self.config.max_num_seqs:
                break
            budget -= self._write_chunk(view, at, request, budget, 0)
            at += 1
        if may_admit:
            at, budget = self._admit_waiting(view, at, budget)
        return at, total - budget

    def _admit_waiting(self, view: StepInputView, at: int, budget: int) -> tuple[int, int]:
        set_aside: list[Request] = []
        while budget > 0 and at < self.config.max_num_seqs and self._has_room_for_row():
            request = self.waiting.peek()
            if request is None:
                break
            if self._waits_for_leader(request):
                set_aside.append(self.waiting.set_aside())
                continue
            if not self._admit(request):
                break
            budget -= self._write_chunk(view, at, request, budget, int(StepFlag.NEW))
            at += 1
        for request in set_aside:
            self.waiting.restore(request)
        return at, budget

    def _has_room_for_row(self) -> bool:
        """A step has max_num_seqs entries, so no more rows than that may want one."""
        return self.decode.num + len(self._prefilling) < self.config.max_num_seqs

    def _waits_for_leader(self, request: Request) -> bool:
        """A sibling shares its leader's blocks, so it waits until these are computed and in the index."""
        leader = request.leader
        if leader is None or not self.config.enable_prefix_caching or request.num_preemptions:
            return False
        if leader.status is not RequestStatus.RUNNING:
            return leader.status is RequestStatus.WAITING and leader.num_preemptions == 0
        # Only full blocks strictly below the prompt's end can be shared.
        whole = (request.num_prompt - 1) // self.config.block_size
        return bool(self._num_hashed[leader.row] < whole)

    def _admit(self, request: Request) -> bool:
        """Give the request a row and all blocks its known tokens need; False, and nothing changed, if short."""
        # match
        num_known = len(request.token_ids)
        cached = self._match(request, num_known)
        need = -(-num_known // self.config.block_size) - len(cached)
        # reserve: whoever runs already may need one more block each before long, and must not preempt for it
        spare = self.decode.num + len(self._prefilling)
        if self.pool.num_free - self.pool.num_free_among(cached) < need + spare:
            return False
        row = self.rows.hand_out()
        if row is None:
            return False
        try:
            self.table.write_params(row, request.params)  # may refuse, so before anything else is taken
        except ValueError:
            self.rows.end(row, self._next_step_id - 1)
            raise
        # commit
        self.pool.take(cached)
        fresh = self.pool.pop(need)
        assert fresh is not None
        self.waiting.remove(self.waiting.set_aside())
        self._fill_row(request, row, cached, fresh)
        self._count_hits(request, len(cached) * self.config.block_size)
        self._prefilling.append(request)
        return True

    def _match(self, request: Request, num_known: int) -> list[int]:
        """Known blocks of its prefix, whole and strictly below `num_known`: a shared block is never rewritten."""
        if not self.config.enable_prefix_caching:
            return []
        whole = (num_known - 1) // self.config.block_size
        request.extend_hashes(request.token_ids, whole, self.config.block_size)
        return self.pool.match(request.block_hashes[:whole])

    def _count_hits(self, request: Request, num_cached: int) -> None:
        if request.num_preemptions == 0 and self.config.enable_prefix_caching:
            request.num_cached_tokens = num_cached
            self.counters.prefix_queries += request.num_prompt
            self.counters.prefix_hits += num_cached

    def _fill_row(self, request: Request, row: int, cached: list[int], fresh: NDArray[np.int32]) -> None:
        table, num_known = self.table, len(request.token_ids)
        num_cached = len(cached) * self.config.block_size
        num_blocks = len(cached) + len(fresh)
        table.token_ids[row, :num_known] = request.token_ids
        table.block_table[row, : len(cached)] = cached
        table.block_table[row, len(cached) : num_blocks] = fresh
        table.num_prompt[row] = request.num_prompt
        table.num_known[row] = num_known
        table.num_blocks[row] = num_blocks
        self._num_tokens[row] = num_known
        self._num_computed[row] = self._num_scheduled[row] = num_cached
        self._num_hashed[row] = len(cached)
        self._limit[row] = request.limit
        self._num_blocks[row] = num_blocks
        self._stop_uses[list(request.stop_token_ids)] += 1
        self._request_of[row] = request
        request.row = row
        request.status = RequestStatus.RUNNING

    def _write_chunk(self, view: StepInputView, at: int, request: Request, budget: int, flags: int) -> int:
        """Write one entry of at most `budget` tokens; the chunk that ends the known tokens draws the next one."""
        row = request.row
        start, end = int(self._num_scheduled[row]), int(self._num_tokens[row])
        count = min(end - start, budget)
        if start + count == end:
            flags |= int(StepFlag.SAMPLE)
            self._prefilling.remove(request)
            if end < request.limit - 1:
                border = int(self._num_blocks[row]) * self.config.block_size
                self.decode.add(request, int(self.table.generation[row]), end, border)
        view.rows[at] = row
        view.generation[at] = self.table.generation[row]
        view.start[at] = start
        view.num_tokens[at] = count
        view.flags[at] = flags
        self._num_scheduled[row] = start + count
        return count

    # --- preemption and end ---------------------------------------------------------------------------------

    def _victim(self) -> Request:
        """The least urgent of those that compute: the last to arrive, or the lowest priority."""
        return max(self.decode.requests + self._prefilling, key=lambda request: request.key)

    def _preempt(self, request: Request) -> None:
        """Send it back to the line with the tokens it has; all of them are recomputed, or found in the cache."""
        row = request.row
        request.token_ids = self.table.token_ids[row, : self._num_tokens[row]].copy()
        self._end_row(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.waiting.push(request)

    def _end_row(self, request: Request, keep: bool = True) -> None:
        """Give back the row (after quarantine) and the blocks; without `keep`, what they hold is trusted no more."""
        row = request.row
        blocks = self.table.block_table[row, : self._num_blocks[row]]
        if keep:
            self._index_blocks(request, int(self._num_computed[row]) // self.config.block_size)
        else:
            self.pool.forget(blocks)
        if row in self.decode:
            self.decode.remove(row)
            self._pending.forget(row)
        elif request in self._prefilling:
            self._prefilling.remove(request)
        self.pool.release(blocks)
        self._stop_uses[list(request.stop_token_ids)] -= 1
        self._request_of[row] = None
        self.rows.end(row, self._next_step_id - 1)
        if not self._in_flight:
            self.rows.returned(self._next_step_id - 1)
        request.row = -1

    # --- one step back --------------------------------------------------------------------------------------

    def update(self, view: StepOutputView, step_id: int) -> Returned:
        """Take the output of the oldest step in flight. Raises ProtocolError when it is not that."""
        step = self._expect(view, step_id)
        num = step.num_rows
        rows = view.rows[:num]
        entries = _ALL
        alive = self.table.generation[rows] == view.generation[:num]
        if not alive.all():
            entries = alive.nonzero()[0]
            rows = rows[entries]
        self._advance_computed(rows, step.view.start[:num][entries] + step.view.num_tokens[:num][entries])
        accepted = view.num_accepted[:num][entries]
        if not accepted.all():
            drew = accepted.nonzero()[0]
            entries = drew if isinstance(entries, slice) else entries[drew]
            rows = rows[drew]
        returned = self._take_tokens(step, view, entries, rows)
        self.rows.returned(step_id)
        return returned

    def _expect(self, view: StepOutputView, step_id: int) -> Step:
        if not self._in_flight or self._in_flight[0].step_id != step_id:
            raise ProtocolError(f"step {step_id} came back, which is not the oldest in flight")
        step = self._in_flight[0]
        num = int(view.header[StepOutputView.NUM_ROWS])
        if num != step.num_rows or view.rows[:num].tobytes() != step.view.rows[:num].tobytes():
            raise ProtocolError(f"step {step_id} came back with other rows than were sent")
        return self._in_flight.popleft()

    def _advance_computed(self, rows: NDArray[np.int32], computed: NDArray[np.int32]) -> None:
        self._num_computed[rows] = computed
        if self.config.enable_prefix_caching:
            full = computed >> self._block_shift
            crossed = (full > self._num_hashed[rows]).nonzero()[0]
            if crossed.size:
                self._to_index.append((rows[crossed], self.table.generation[rows[crossed]], full[crossed]))

    def _take_tokens(self, step: Step, view: StepOutputView, entries: _Entries, rows: NDArray[np.int32]) -> Returned:
        num = step.num_rows
        drawn = view.tokens[:num, 0][entries]
        at = self._num_tokens[rows]
        self.table.token_ids[rows, at] = drawn
        at += 1
        self._num_tokens[rows] = at
        failed = view.num_accepted[:num][entries] < 0
        request_of = self._request_of
        requests: list[Request] = [request_of[row] for row in rows.tolist()]  # type: ignore[misc]
        numbers = list(range(num)) if isinstance(entries, slice) else entries.tolist()
        returned = Returned(step, requests, drawn.tolist(), numbers)
        ends = ((at >= self._limit[rows]) | (self._stop_uses[drawn] > 0) | failed).nonzero()[0]
        for index in ends.tolist():
            self._maybe_finish(returned, index, bool(failed[index]))
        return returned

    def _maybe_finish(self, returned: Returned, index: int, failed: bool) -> None:
        request, token = returned.requests[index], returned.tokens[index]
        stop_token = None
        if failed:
            reason = FinishReason.ERROR
        elif token in request.stop_token_ids:
            reason, stop_token = FinishReason.STOP, token
        elif self._num_tokens[request.row] >= request.limit:
            reason = FinishReason.LENGTH
        else:
            return
        self._end_row(request, keep=not failed)
        request.status = RequestStatus.FINISHED
        returned.finished.append((request, reason, stop_token))

    def settle(self) -> None:
        """What can wait until nothing waits for the scheduler: call it after the next step has been published.

        Blocks that lately became full enter the prefix index, and rows get the blocks that they will soon need.
        """
        for rows, generations, num_full in self._to_index:
            for row, generation, full in zip(rows.tolist(), generations.tolist(), num_full.tolist(), strict=True):
                request = self._request_of[row]
                if request is not None and self.table.generation[row] == generation:
                    self._index_blocks(request, full)
        self._to_index.clear()
        if self.decode.grow_in <= _LOOK_EVERY and not self._pending.count:
            self._grow_ahead()

    def _index_blocks(self, request: Request, num_full: int) -> None:
        row = request.row
        hashed = int(self._num_hashed[row])
        if not self.config.enable_prefix_caching or num_full <= hashed:
            return
        request.extend_hashes(self.table.token_ids[row], num_full, self.config.block_size)
        blocks = self.table.block_table[row, hashed:num_full].tolist()
        for block_hash, block in zip(request.block_hashes[hashed:num_full], blocks, strict=True):
            self.pool.insert(block_hash, block)
        self._num_hashed[row] = num_full

    # --- proof ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Recompute rows, blocks and columns from first principles. Raises AssertionError."""
        held = [row for row, request in enumerate(self._request_of) if request is not None]
        self.pool.check_integrity([self.table.block_table[row, : self._num_blocks[row]] for row in held])
        self.rows.check_integrity(held)
        self.decode.check_integrity()
        uses = np.zeros_like(self._stop_uses)
        for row in held:
            self._check_row(row)
            request = self._request_of[row]
            assert request is not None
            uses[list(request.stop_token_ids)] += 1
        assert np.array_equal(uses, self._stop_uses), "stop token uses are off"
        for request in self.waiting.requests():
            assert request.status is RequestStatus.WAITING and request.row == -1

    def _check_row(self, row: int) -> None:
        request = self._request_of[row]
        assert request is not None and request.row == row and request.status is RequestStatus.RUNNING
        known = int(self._num_tokens[row])
        assert self._num_computed[row] <= self._num_tokens[row] <= request.limit
        assert len(request.block_hashes) * self.config.block_size <= max(known, request.num_prompt)
        assert self._num_blocks[row] * self.config.block_size >= self._num_computed[row]
