"""`Runner`: one StepInput to one StepOutput. Owns model, KV pool, row state, sampler and proposer of this worker.

Order within a step: block appends and new rows first (everything after reads row state), then drafts, index tensors,
blocks cleaned, forward pass, draws and verification, the accepted drafts' keys and values put in a line, row state
moved on, output written, reports. An entry whose logits were not finite says num_accepted = NON_FINITE (or NO_MATCH)
and draws nothing; its neighbours are not touched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from slipring.shm.spec import WorkerConfig
from slipring.shm.table import BatchTable
from slipring.shm.wire import NON_FINITE, StepFlag, StepInputView, StepOutputView, StepShape
from slipring.workers.batch import Batch
from slipring.workers.batch_builder import BatchBuilder
from slipring.workers.constraints import Constraints
from slipring.workers.entries import Entries, entries_of, known_start, room_for_drafts
from slipring.workers.kv_cache import DTYPES, KvCache
from slipring.workers.link import StartRefused
from slipring.workers.models.llama import Llama
from slipring.workers.reports import Reporter
from slipring.workers.rows import Rows
from slipring.workers.sampler import Sampler
from slipring.workers.speculation.proposer import Drafts, NullProposer, Proposer
from slipring.workers.speculation.verify import Runs, verify

_WARM_UP_TOKENS = 32
_COST_RUNS, _FEW_TOKENS = 3, 8


class Runner:
    """Runs steps in order. Not thread-safe."""

    def __init__(
        self,
        config: WorkerConfig,
        model: Llama,
        kv: KvCache,
        table: BatchTable,
        constraints: Constraints,
        proposer: Proposer | None = None,
    ) -> None:
        spec = config.model
        dtype = DTYPES[config.dtype]
        layer_block_bytes = config.block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        self.kv = kv
        self._config = config
        self.model = model
        self.rows = Rows(table)
        self._constraints = constraints
        rejection_sampling = config.speculation is not None and config.speculation.rejection_sampling
        self.sampler = Sampler(table, spec.vocab_size, constraints, rejection_sampling)
        self.proposer = proposer or NullProposer()
        group_heads = spec.num_heads // spec.num_kv_heads
        self.builder = BatchBuilder(table, self.rows, config.block_size, layer_block_bytes, group_heads, dtype)
        self._reporter = Reporter(model, table)
        self.table = table

    @torch.inference_mode()
    def run(self, step: StepInputView, output: StepOutputView) -> None:
        """Run the step and fill `output`, device times included; PICKED_UP and PUBLISHED are the caller's."""
        began = time.monotonic_ns()
        self._update_rows(step)
        entries = self._entries(step)
        output.answer(step)
        if not entries.num_tokens.any():
            return  # every row has reached its limit in a step that the engine has not seen yet
        batch, hidden, logits = self._forward(entries)
        forwarded = time.monotonic_ns()
        runs = None
        if len(logits):
            num_outputs = self.rows.num_outputs[entries.rows].astype(np.int64)
            runs = verify(entries, logits, num_outputs, self.sampler)
            self._straighten(entries, runs)
            self._move_on(entries, runs)
            self._write(output, entries, runs)
        self.proposer.saw(entries, batch, hidden, runs)
        for report in self._reporter.reports(step, hidden):
            output.add_report(report.entry, report.words.numpy())
            if not report.ok:
                output.num_accepted[report.entry] = NON_FINITE
        ended = time.monotonic_ns()
        if entries.num_decode == len(entries.rows):
            self.proposer.step_took(int(entries.num_tokens.sum()), (ended - began) / 1e9)
        output.times_ns[output.FORWARD] = forwarded - began
        output.times_ns[output.SAMPLE] = ended - forwarded

    def warm_up(self) -> None:
        """One prompt chunk and one decode step on row 0, so that the first request meets no first-time cost."""
        config = self._config
        shape = StepShape.of(config.max_num_seqs, config.max_draft, config.block_size)
        step = StepInputView(memoryview(bytearray(shape.input_bytes)), shape)
        output = StepOutputView(memoryview(bytearray(shape.output_bytes)), shape)
        num_tokens = min(_WARM_UP_TOKENS, config.max_model_len - 1, self.kv.num_blocks * config.block_size - 1)
        self.rows.block_table[0] = np.arange(self.rows.block_table.shape[1]) % self.kv.num_blocks
        self.rows.generation[0] = 0
        self.rows.limit[0] = config.max_model_len
        step.header[step.NUM_ROWS] = 1
        for is_decode, start, count in ((0, 0, max(1, num_tokens)), (1, num_tokens, 1)):
            step.header[step.NUM_DECODE] = is_decode
            step.start[0], step.num_tokens[0], step.flags[0] = start, count, StepFlag.SAMPLE
            self.run(step, output)
            if output.num_accepted[0] == NON_FINITE:
                raise StartRefused(
                    f"the model in {config.model.path} computes no finite numbers: are its weights whole?"
                )
        self.rows.generation[0] = -1

    def decode_costs(self, sizes: Sequence[int]) -> list[float]:
        """Seconds of decode steps by their number of tokens: one row with drafts, on blocks that nobody has yet.

        The large ones take long, and are what observed steps correct first; they are measured once.
        """
        self.rows.block_table[0] = np.arange(self.rows.block_table.shape[1]) % self.kv.num_blocks
        runs = (_COST_RUNS if size <= _FEW_TOKENS else 1 for size in sizes)
        return [min(self._decode_cost(size) for _ in range(num)) for size, num in zip(sizes, runs, strict=True)]

    @torch.inference_mode()
    def _decode_cost(self, size: int) -> float:
        began = time.monotonic()
        sizes, zero = np.array([size]), np.zeros(1, np.int64)
        entries = Entries(zero, zero, sizes, 1, Drafts.none(1, size - 1), sizes)
        *_, logits = self._forward(entries)
        verify(entries, logits, zero, self.sampler)
        return time.monotonic() - began

    def _forward(self, entries: Entries) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        """The batch, the last hidden states of its tokens, and logits of the entries' draws."""
        batch = self.builder.build_in(entries, self.kv)
        hidden = self.model.hidden(batch, self.kv)
        return batch, hidden, self.model.logits(hidden, batch.sample_at)

    def _update_rows(self, step: StepInputView) -> None:
        header = step.header
        num_rows, num_appends = int(header[step.NUM_ROWS]), int(header[step.NUM_APPENDS])
        rows, generation = step.rows[:num_rows], step.generation[:num_rows]
        for i in np.flatnonzero(step.flags[:num_rows] & StepFlag.NEW).tolist():
            self.rows.admit(int(rows[i]), int(generation[i]))
            self.sampler.admit(int(rows[i]))
            self.proposer.admit(int(rows[i]), self.table.token_ids[rows[i], : self.table.num_known[rows[i]]])
        if num_appends:
            self.rows.append_blocks(
                step.append_rows[:num_appends], step.append_index[:num_appends], step.append_blocks[:num_appends]
            )
        self.rows.check(rows, generation)

    def _entries(self, step: StepInputView) -> Entries:
        """What the step computes, with the drafts that are made for it now."""
        num_decode = int(step.header[step.NUM_DECODE])
        start = known_start(step, self.rows)
        rows = step.rows[:num_decode].astype(np.int64)
        room = room_for_drafts(step, self.rows, start)
        self.proposer.catch_up(rows[room > 0])
        drafts = self.proposer.propose(rows, room)
        drafts = drafts.first(drafts.num)
        self._constraints.expect(rows, drafts)
        return entries_of(step, self.rows, start, drafts)

    def _straighten(self, entries: Entries, runs: Runs) -> None:
        """Accepted drafts of a tree lie where the tree had them; the next step reads them as a chain."""
        entry, behind, place = runs.detours
        if len(entry):
            rows, start = entries.rows[entry], entries.start[entry]
            source, target = (self.builder.slots(rows, start + at) for at in (behind, place))
            self.kv.move(torch.from_numpy(source), torch.from_numpy(target))

    def _move_on(self, entries: Entries, runs: Runs) -> None:
        """Row state follows what was drawn."""
        drew = np.flatnonzero(runs.count)
        rows, count, tokens = entries.rows[drew], runs.count[drew], runs.tokens[drew]
        position = entries.end[drew] - entries.num_draws[drew] + count
        self.rows.draw(rows, position, tokens[np.arange(len(drew)), count - 1], count)
        drawn = tokens[np.arange(tokens.shape[1]) < count[:, None]]
        self._constraints.accept(np.repeat(rows, count), lambda: (drawn, np.ones(len(drawn), bool)))
        self.proposer.accept(rows, tokens, count)

    def _write(self, output: StepOutputView, entries: Entries, runs: Runs) -> None:
        num_rows, num_decode, width = len(entries.rows), entries.num_decode, runs.tokens.shape[1]
        output.num_accepted[:num_rows] = np.where(runs.failure, runs.failure, runs.count)
        output.tokens[:num_rows, :width] = runs.tokens
        output.num_draft[:num_rows] = 0
        output.num_draft[:num_decode] = entries.drafts.num
        for found in runs.logprobs:
            kept, logprobs = found.kept, found.logprobs
            count = logprobs.top_ids.shape[1]
            at = found.entry[kept] * output.tokens.shape[1] + found.place
            output.header[output.NUM_LOGPROBS] = max(output.header[output.NUM_LOGPROBS], count)
            output.logprob[at] = logprobs.logprob[kept]
            output.rank[at] = logprobs.rank[kept]
            output.top_ids[at, :count] = logprobs.top_ids[kept]
            output.top_logprobs[at, :count] = logprobs.top_logprobs[kept]
