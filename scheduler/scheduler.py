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

Who owns what: blocks belong to `BlockPool`, rows to `RowAllocator`, the books of live rows to `LiveRows`; a running
request holds one row and the blocks in that row's block table, both from admission to `_end_row`, which is the only
place that gives them back.
Admission is match → reserve → commit; until the commit nothing has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from slipring.scheduler.accepted_runs import AcceptedRuns
from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.config import SchedulerConfig
from slipring.scheduler.decode_rows import NEVER, DecodeRows, PendingAppends
from slipring.scheduler.live_rows import Int32Array, LiveRows
from slipring.scheduler.offload.port import NullOffload, OffloadPort
from slipring.scheduler.offload.transfers import Transfer
from slipring.scheduler.request import FinishReason, Request, RequestStatus
from slipring.scheduler.rows import RowAllocator
from slipring.scheduler.step import ChunkRoom, Counters, ProtocolError, Report, Returned, Step
from slipring.scheduler.waiting import WaitingQueue
from slipring.shm.table import BatchTable
from slipring.shm.wire import REPORT_WORDS, StepFlag, StepInputView, StepOutputView

_LOOK_AHEAD = 8
"""A decode row gets its next block at most so many positions, and two steps' drafts, before it needs it."""
_LOOK_EVERY = 4
"""`settle` looks for such rows when somebody may need a block within so many positions, and two steps' drafts; more
than the pipeline's depth."""
_DECODE_FLAGS = int(StepFlag.SAMPLE | StepFlag.LAST_TOKEN)
_DRAFT_SHARE = 0.5
"""Of a step's tokens, what decode rows and their drafts may take where prompts want their share."""


_Entries = NDArray[np.intp] | slice
_ALL = slice(None)
"""Every entry of a step, as an index that copies nothing."""


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        table: BatchTable,
        vocab_size: int,
        make_offload: Callable[[BlockPool], OffloadPort] = NullOffload,
        counters: Counters | None = None,
    ) -> None:
        """`make_offload` gets the pool that the tiers load into and store from; `counters` go on."""
        self.config = config
        self.table = table
        self.pool = BlockPool(config.num_blocks)
        self.offload = make_offload(self.pool)
        self.rows = RowAllocator(table.generation)
        self.waiting = WaitingQueue(config.policy, config.priority_age_s)
        self.decode = DecodeRows(config.max_num_seqs, config.num_rows)
        self.counters = counters or Counters()
        self.mixed_chunk = config.max_mixed_chunk
        """Most prompt tokens beside decode rows; the loop lowers it to hold an inter-token-latency target."""
        self.frozen = False
        """Nothing is scheduled until this is taken back; what is in flight comes back as ever."""
        self.admitted: list[Request] = []
        """Left the line for the first time in the last step that admitted; only the loop knows the time of that."""
        self._prefilling: list[Request] = []
        self._reporting: list[tuple[int, Request]] = []
        """Of the step at hand."""
        self._in_flight: deque[Step] = deque()
        self._next_step_id = 0
        self._pending = PendingAppends(config.max_num_seqs)
        self._live = LiveRows(config, table, self.pool, vocab_size, self.offload)
        self._look_ahead = _LOOK_AHEAD + 2 * config.max_draft
        self._look_every = _LOOK_EVERY + 2 * config.max_draft
        self._runs = AcceptedRuns(self._live, self.decode, self.counters, config.max_draft, config.draft_depth)
        self._decode_flags = _DECODE_FLAGS | (int(StepFlag.UPPER_BOUND) if config.max_draft else 0)
        self._mark = object()
        """Says whose requests they are. Not the scheduler itself: an ended epoch's memory shall not wait for the
        collector of cycles."""

    # --- requests come and go -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Put a request in line. It must fit: limit <= max_model_len <= the pool; and be no other scheduler's."""
        assert request.holder is None, "a request belongs to one scheduler at a time"
        request.holder = self._mark
        request.key = self.waiting.key(request)
        self.waiting.push(request)
        self.offload.begin(request)

    def abort(self, request: Request) -> bool:
        """End a request wherever it is; False when it had ended already. In-flight results will be dropped."""
        if request.status is RequestStatus.FINISHED:
            return False
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
            self.offload.forget(request)
        else:
            self._end_row(request)
        request.status = RequestStatus.FINISHED
        return True

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_admitted(self) -> int:
        """Requests that hold a row. Whose last step is not back yet has left its place in the batch to another, so
        these may be more than max_num_seqs."""
        return self.config.num_rows - self._live.request_of.count(None)

    @property
    def num_running(self) -> int:
        """Places of the batch that are taken, at most max_num_seqs."""
        return min(self.num_admitted, self.config.max_num_seqs)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def request_at(self, row: int, generation: int) -> Request | None:
        """Whose admission this is; None when it has ended."""
        return self._live.request_of[row] if self.table.generation[row] == generation else None

    def requests_in_flight(self) -> list[Request]:
        """Those that the steps in flight are computing, each once."""
        found: dict[int, Request] = {}
        for step in self._in_flight:
            rows, generations = step.view.rows[: step.num_rows], step.view.generation[: step.num_rows]
            for row, generation in zip(rows.tolist(), generations.tolist(), strict=True):
                if (request := self.request_at(row, generation)) is not None:
                    found[row] = request
        return list(found.values())

    @property
    def is_bereft(self) -> bool:
        """Requests that hold rows were taken from it, so that what comes back for these must change nothing."""
        return any(request is not None and request.holder is not self._mark for request in self._live.request_of)

    @property
    def has_work(self) -> bool:
        """Something could be scheduled, now or once blocks or rows come back."""
        return not self.frozen and bool(self.decode.num or self._prefilling or len(self.waiting))

    # --- one step out ---------------------------------------------------------------------------------------

    def schedule(self, view: StepInputView) -> Step | None:
        """Decide the next step and write it to `view`; None when no row can do anything now."""
        decode = self.decode
        preemptions = self.counters.num_preemptions
        if decode.done_in <= 0:
            for row in decode.done_rows():
                decode.remove(row)
        num_draft = self._num_draft() if self.config.max_draft else 0
        num_appends = self._pending.drain(view) if self._pending.count else 0
        while decode.grow_in <= num_draft:
            num_appends = self._grow(view, num_appends, num_draft)
        num = decode.num
        view.rows[:num] = decode.row[:num]
        view.generation[:num] = decode.generation[:num]
        view.start[:num] = decode.start[:num]
        view.num_tokens[:num] = 1 + num_draft
        view.num_draft[:num] = num_draft
        view.flags[:num] = self._decode_flags
        decode.advance(num_draft)
        num_rows, num_chunk_tokens, num_tokens = num, 0, num * (1 + num_draft)
        if self._prefilling or len(self.waiting):
            may_admit = self.counters.num_preemptions == preemptions
            num_rows, num_chunk_tokens = self._schedule_chunks(view, num, num_tokens, may_admit)
        if num_rows == 0:
            return None
        return self._seal(view, num_rows, num, num_appends, num_tokens, num_chunk_tokens)

    def _num_draft(self) -> int:
        """Drafts that each decode row of this step may hold: as many as their number allows, and room and blocks."""
        num, config = self.decode.num, self.config
        if num == 0:
            return 0
        room = config.max_num_batched_tokens
        if self._prefilling or len(self.waiting):
            room = int(room * _DRAFT_SHARE)
        num_draft = max(0, min(config.draft_widths[num], room // num - 1))
        # Never preempt for drafts, nor take what an admission is waiting for.
        most_blocks = num * -(-(1 + num_draft) // config.block_size)
        return num_draft if self.pool.num_free >= most_blocks else 0

    def _seal(
        self, view: StepInputView, num_rows: int, num_decode: int, num_appends: int, decode: int, chunk: int
    ) -> Step:
        header = view.header
        header[StepInputView.NUM_ROWS] = num_rows
        header[StepInputView.NUM_DECODE] = num_decode
        header[StepInputView.NUM_APPENDS] = num_appends
        header[StepInputView.NUM_TOKENS] = decode + chunk
        step = Step(self._next_step_id, view, num_rows, num_decode, chunk, self._reporting)
        self._reporting = []
        self._next_step_id += 1
        self._in_flight.append(step)
        self.counters.num_steps += 1
        return step

    def _grow(self, view: StepInputView, at: int, num_draft: int) -> int:
        """Give a block to every decode row that needs one now, which `settle` could not give it before.

        With drafts a row may need several: then its countdown stays due, and the caller comes again.
        Preempts when the pool is empty. Writes its appends from entry `at` on; returns how many there are then.
        """
        decode = self.decode
        while True:
            left = decode.grow_at[: decode.num] - decode.start[: decode.num]
            due = (left <= num_draft).nonzero()[0]
            blocks = self.pool.pop(due.size)
            if blocks is not None:
                break
            if self.offload.give_way():
                continue
            # An append of the victim may stand in `view` already. It can do no harm: a step that preempts admits
            # nobody, so the row is nobody's when the worker reads it.
            self._preempt(self._victim())
        decode.grow_in = 1 + num_draft
        rows, index = self._give(due, blocks)
        if num_draft >= self.config.block_size:
            left = decode.grow_at[: decode.num] - decode.start[: decode.num]
            decode.grow_in = min(decode.grow_in, int(left.min(initial=NEVER)))
        end = at + due.size
        view.append_rows[at:end] = rows
        view.append_index[at:end] = index
        view.append_blocks[at:end] = blocks
        return end

    def _grow_ahead(self) -> None:
        """Give blocks to decode rows that will need one within a few steps, while nobody waits for the scheduler."""
        decode = self.decode
        left = decode.grow_at[: decode.num] - decode.start[: decode.num]
        due = (left < self._look_ahead).nonzero()[0]
        blocks = self.pool.pop(due.size)
        if blocks is None:
            return  # `_grow` will give what is needed when it is needed, to those who need it most
        # Whoever got none can go on for so long, and whoever got one has a whole block.
        decode.grow_in = min(self._look_ahead, self.config.block_size)
        self._pending.add(*self._give(due, blocks), blocks)

    def _give(self, due: NDArray[np.intp], blocks: Int32Array) -> tuple[Int32Array, Int32Array]:
        """One block for each of these decode entries; returns (rows, index in their block tables)."""
        decode = self.decode
        rows = decode.row[due]
        index, border = self._live.append_blocks(rows, blocks)
        border[border >= decode.last[due]] = NEVER
        decode.grow_at[due] = border
        return rows, index

    # --- prompts: chunks and admissions ---------------------------------------------------------------------

    def _schedule_chunks(self, view: StepInputView, at: int, num_tokens: int, may_admit: bool) -> tuple[int, int]:
        """Write chunks from entry `at` on, beside `num_tokens` of decode; returns (entries now, prompt tokens).

        A step that preempted admits nobody (`may_admit`), or it would take back what it has just given up.
        """
        budget = self.config.max_num_batched_tokens - num_tokens
        if at:
            budget = min(budget, max(1, self.mixed_chunk))
        room = ChunkRoom(budget, REPORT_WORDS)
        for request in self._prefilling.copy():
            if room.tokens <= 0 or at >= self.config.max_num_seqs:
                break
            if room.allows(request):
                self._write_chunk(view, at, request, room, 0)
                at += 1
        if may_admit:
            at = self._admit_waiting(view, at, room)
        return at, budget - room.tokens

    def _admit_waiting(self, view: StepInputView, at: int, room: ChunkRoom) -> int:
        self.admitted.clear()
        set_aside: list[Request] = []
        while room.tokens > 0 and at < self.config.max_num_seqs and self._has_room_for_row():
            request = self.waiting.peek()
            if request is None or not room.allows(request):
                break
            if self._waits_for_leader(request) or self._waits_for_load(request):
                set_aside.append(self.waiting.set_aside())
                continue
            if not self._admit(request) and not self._admit_alone(request, at):
                break
            self._write_chunk(view, at, request, room, int(StepFlag.NEW))
            at += 1
        for request in set_aside:
            self.waiting.restore(request)
        return at

    @property
    def _spare(self) -> int:
        """Whoever runs already may need one more block each before long, and must not preempt for it."""
        return self.decode.num + len(self._prefilling)

    def _admit_alone(self, request: Request, num_entries: int) -> bool:
        """Where nobody runs who would give blocks back some day, loads that wait to be admitted must."""
        alone = not (num_entries or self._spare or self._in_flight)
        return alone and self.offload.give_way() and self._admit(request)

    def _has_room_for_row(self) -> bool:
        """A step has max_num_seqs entries, so no more rows than that may want one."""
        return self.decode.num + len(self._prefilling) < self.config.max_num_seqs

    def _waits_for_load(self, request: Request) -> bool:
        return self.offload.holds_back(request, self.pool.num_free - self._spare, self._next_step_id - 1)

    def _waits_for_leader(self, request: Request) -> bool:
        """A sibling shares its leader's blocks, so it waits until these are computed and in the index."""
        leader = request.leader
        if leader is None or not self.config.enable_prefix_caching or request.num_preemptions:
            return False
        if request.num_reusable == 0:
            return False
        if leader.status is not RequestStatus.RUNNING:
            # One that is not in line itself (its grammar is being built) would be waited for in vain.
            return leader in self.waiting and leader.num_preemptions == 0
        whole = request.num_shared_blocks
        if whole is None:
            # Only full blocks strictly below the prompt's end can be shared.
            whole = (request.num_prompt - 1) // self.config.block_size
        return bool(self._live.num_indexed[leader.row] < whole)

    def _admit(self, request: Request) -> bool:
        """Give the request a row and all blocks its known tokens need; False, and nothing changed, if short."""
        # match
        num_known = len(request.token_ids)
        cached = self._live.match(request)
        need = -(-num_known // self.config.block_size) - len(cached)
        # reserve
        if self.pool.num_free - self.pool.num_free_among(cached) < need + self._spare:
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
        self._live.fill(request, row, cached, fresh)
        self._count_hits(request, len(cached), self.offload.admitted(request, len(cached)))
        self._prefilling.append(request)
        if not request.num_preemptions:
            self.admitted.append(request)
        return True

    def _count_hits(self, request: Request, num_cached: int, num_from_tiers: int) -> None:
        """`num_cached` blocks were found, `num_from_tiers` of them had been loaded for it."""
        request.num_admissions += 1
        if request.num_admissions == 1 and self.config.enable_prefix_caching:
            request.num_cached_tokens = num_cached * self.config.block_size
            self.counters.prefix_queries += request.num_prompt
            self.counters.prefix_hits += request.num_cached_tokens
            self.counters.external_hits += num_from_tiers * self.config.block_size

    def _write_chunk(self, view: StepInputView, at: int, request: Request, room: ChunkRoom, flags: int) -> None:
        """Write one entry, as long as there is room; the chunk that ends the known tokens draws the next one."""
        row, live = request.row, self._live
        start, end = int(live.num_scheduled[row]), int(live.num_tokens[row])
        count, reports = room.take(request, start, end)
        flags |= int(reports)
        if start + count == end:
            flags |= int(StepFlag.SAMPLE) * request.draws
            self._prefilling.remove(request)
            if end < request.limit - 1:
                border = int(live.num_blocks[row]) * self.config.block_size
                self.decode.add(request, int(self.table.generation[row]), end, border)
        view.rows[at] = row
        view.generation[at] = self.table.generation[row]
        view.start[at] = start
        view.num_tokens[at] = count
        view.num_draft[at] = 0
        view.flags[at] = flags
        live.num_scheduled[row] = start + count
        if reports or (start + count == end and not request.draws):
            self._reporting.append((at, request))

    # --- preemption and end ---------------------------------------------------------------------------------

    def _victim(self) -> Request:
        """The least urgent of those that compute: the last to arrive, or the lowest priority."""
        return max(self.decode.requests + self._prefilling, key=lambda request: request.key)

    def _preempt(self, request: Request) -> None:
        """Send it back to the line with the tokens it has; all of them are recomputed, or found in the cache."""
        request.token_ids = self._live.tokens_of(request.row)
        self._end_row(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self.waiting.push(request)

    def _end_row(self, request: Request, keep: bool = True) -> None:
        """Give back the blocks, and the row after its quarantine (`LiveRows.vacate`)."""
        row = request.row
        if row in self.decode:
            self.decode.remove(row)
            self._pending.forget(row)
        elif request in self._prefilling:
            self._prefilling.remove(request)
        self._live.vacate(request, keep)
        self.rows.end(row, self._next_step_id - 1)
        if not self._in_flight:
            self.rows.returned(self._next_step_id - 1)

    # --- one step back --------------------------------------------------------------------------------------

    def update(self, view: StepOutputView, step_id: int) -> Returned:
        """Take the output of the oldest step in flight. Raises ProtocolError when it is not that."""
        step = self._expect(view, step_id)
        reports = [report for mark in step.reporting if (report := self._take_report(step, view, *mark))]
        num = step.num_rows
        rows = view.rows[:num]
        entries = _ALL
        alive = self.table.generation[rows] == view.generation[:num]
        if not alive.all():
            entries = alive.nonzero()[0]
            rows = rows[entries]
        if self.config.max_draft:
            returned = self._take_runs(step, view, entries, rows)
            returned.reports = reports
            self.rows.returned(step_id)
            return returned
        self._live.advance_computed(rows, step.view.start[:num][entries] + step.view.num_tokens[:num][entries])
        accepted = view.num_accepted[:num][entries]
        if not accepted.all():
            drew = accepted.nonzero()[0]
            entries = drew if isinstance(entries, slice) else entries[drew]
            rows = rows[drew]
        returned = self._take_tokens(step, view, entries, rows)
        returned.reports = reports
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

    def _take_report(self, step: Step, view: StepOutputView, entry: int, request: Request) -> Report | None:
        """What an entry says of its prompt; None when its admission has ended. Ends a request that draws nothing."""
        row, start = int(view.rows[entry]), int(step.view.start[entry])
        if self.table.generation[row] != view.generation[entry]:
            return None
        end, flags = start + int(step.view.num_tokens[entry]), int(step.view.flags[entry])
        report = Report(request, entry, num_known=0, ended=None)
        if flags & StepFlag.SCORE:
            report.num_known = request.num_scored - start
            request.num_scored = max(request.num_scored, min(end, request.num_prompt - 1))
        failed = bool(view.num_accepted[entry] < 0) and not flags & StepFlag.SAMPLE
        if failed or (end == request.num_prompt and not request.draws):
            self._live.advance_computed(view.rows[entry : entry + 1], np.array([end], np.int32))
            self._end_row(request, keep=not failed)
            request.status = RequestStatus.FINISHED
            report.ended = FinishReason.ERROR if failed else FinishReason.LENGTH
        return report

    def _take_tokens(self, step: Step, view: StepOutputView, entries: _Entries, rows: NDArray[np.int32]) -> Returned:
        num = step.num_rows
        drawn = view.tokens[:num, 0][entries]
        num_tokens = self._live.append_tokens(rows, drawn)
        failed = view.num_accepted[:num][entries] < 0
        request_of = self._live.request_of
        requests: list[Request] = [request_of[row] for row in rows.tolist()]  # type: ignore[misc]
        numbers = list(range(num)) if isinstance(entries, slice) else entries.tolist()
        returned = Returned(step, requests, drawn.tolist(), numbers)
        ends = ((num_tokens >= self._live.limit[rows]) | (self._live.stop_uses[drawn] > 0) | failed).nonzero()[0]
        for index in ends.tolist():
            self._maybe_finish(returned, index, bool(failed[index]))
        return returned

    def _take_runs(self, step: Step, view: StepOutputView, entries: _Entries, rows: Int32Array) -> Returned:
        """As `_take_tokens`, where an entry may have drawn several tokens."""
        returned, ends = self._runs.take(step, view, entries, rows)
        for index, failed in ends:
            self._maybe_finish(returned, index, failed)
        return returned

    def _maybe_finish(self, returned: Returned, index: int, failed: bool) -> None:
        request, token = returned.requests[index], returned.tokens[index]
        stop_token = None
        if failed:
            reason = FinishReason.ERROR
        elif token in request.stop_token_ids:
            reason, stop_token = FinishReason.STOP, token
        elif self._live.num_tokens[request.row] >= request.limit:
            reason = FinishReason.LENGTH
        else:
            return
        self._end_row(request, keep=not failed)
        request.status = RequestStatus.FINISHED
        returned.finished[index] = (reason, stop_token)

    def take_transfers(self) -> list[Transfer]:
        """Transfers that the worker may begin now. Ask after every `schedule`, `update` and `settle`."""
        return self.offload.take_transfers(self._in_flight[0].step_id if self._in_flight else self._next_step_id)

    def settle(self) -> None:
        """What can wait until nothing waits for the scheduler: call it after the next step has been published.

        Blocks that lately became full enter the prefix index, and rows get the blocks that they will soon need.
        """
        self._live.index_returned()
        if self.decode.grow_in <= self._look_every and not self._pending.count:
            self._grow_ahead()

    # --- proof ----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Recompute rows, blocks and columns from first principles. Raises AssertionError."""
        self.rows.check_integrity(self._live.check_integrity())
        self.decode.check_integrity()
        for request in self.waiting.requests():
            assert request.status is RequestStatus.WAITING and request.row == -1
