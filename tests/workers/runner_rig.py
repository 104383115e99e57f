"""Drives a real `Runner` in-process with hand-built StepInputs: the scheduler's part, done plainly."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slipring.shm.params import SamplingParams
from slipring.shm.spec import ModelSpec, WorkerConfig
from slipring.shm.table import BatchTable, TableShape
from slipring.shm.wire import StepFlag, StepInputView, StepOutputView, StepShape
from slipring.workers.constraints import Constraints
from slipring.workers.grammar import GrammarStore
from slipring.workers.kv_cache import DTYPES, KvCache
from slipring.workers.loader import Weights
from slipring.workers.models.registry import build_model
from slipring.workers.runner import Runner
from slipring.workers.speculation.proposer import Proposer

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def random_prompts(*lengths: int) -> list[list[int]]:
    """Always the same ones, of the tiny models' tokens."""
    random = np.random.default_rng(5)
    return [random.integers(3, 260, size=length).tolist() for length in lengths]


def worker_config(spec: ModelSpec, **changes: object) -> WorkerConfig:
    values: dict[str, object] = {
        "model": spec,
        "rank": 0,
        "parent_pid": 0,
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 2,
        "block_size": 8,
        "num_blocks": 64,
        "kv_cache_bytes": 0,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_rows": 16,
        "max_draft": 0,
        "reader_index": 0,
        "spin_us": 0,
    }
    fds = ("step_ring", "output_ring", "table", "control_ring", "reply_ring")
    bells = [f"{name}_doorbell" for name in ("step", "output", "control", "reply")]
    values |= {f"{name}_fd": -1 for name in (*fds, *bells, "lifeline")}
    values |= {f"{name}_bytes": 0 for name in fds}
    return WorkerConfig(**(values | changes))  # pyright: ignore[reportArgumentType]


@dataclass
class Sequence:
    """One admitted row, as the scheduler would know it."""

    row: int
    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    new: bool = True
    outputs: list[int] = field(default_factory=list)
    params: SamplingParams = GREEDY
    report: list[int] = field(default_factory=list)


class Rig:
    """A runner, a table, and a block allocator that never frees and hands out scattered blocks."""

    def __init__(self, spec: ModelSpec, seed: int = 0, proposer: Proposer | None = None, **changes: object) -> None:
        self.config = config = worker_config(spec, **changes)
        shape = TableShape(config.num_rows, config.max_model_len, config.block_size)
        self.table = BatchTable.create(shape)
        dtype = DTYPES[config.dtype]
        assert config.num_blocks is not None
        self.kv = KvCache(spec, config.num_blocks, config.block_size, dtype)
        self.model = build_model(spec, Weights(spec, dtype), config.max_model_len)
        self.grammars = GrammarStore(spec)
        constraints = Constraints(self.table, spec, self.grammars, config.max_draft)
        self.runner = Runner(config, self.model, self.kv, self.table, constraints, proposer)
        step_shape = StepShape.of(config.max_num_seqs, config.max_draft, config.block_size)
        self.step = StepInputView(memoryview(bytearray(step_shape.input_bytes)), step_shape)
        self.output = StepOutputView(memoryview(bytearray(step_shape.output_bytes)), step_shape)
        self._free = np.random.default_rng(seed).permutation(config.num_blocks).tolist()
        self._next_row = 0
        self._generation = 0
        self._generations: dict[int, int] = {}

    def admit(self, prompt: list[int], params: SamplingParams = GREEDY, outputs: list[int] | None = None) -> Sequence:
        """Hand out a row; `outputs` are tokens already drawn before a preemption."""
        row, outputs = self._next_row, outputs or []
        self._next_row = (row + 1) % self.config.num_rows
        self._generation += 1
        self._generations[row] = self._generation
        sequence = Sequence(row, prompt + outputs, params=params)
        self.table.token_ids[row, : len(sequence.tokens)] = sequence.tokens
        self.table.num_prompt[row] = len(prompt)
        self.table.num_known[row] = len(sequence.tokens)
        self.table.limit[row] = len(prompt) + params.max_tokens if params.max_tokens > 1 else self.config.max_model_len
        self.table.generation[row] = self._generation
        self._grow(sequence, len(sequence.tokens))
        self.table.block_table[row, : len(sequence.blocks)] = sequence.blocks
        self.table.num_blocks[row] = len(sequence.blocks)
        self.table.write_params(row, params)
        return sequence

    def run(self, decode: list[Sequence], chunks: list[tuple[Sequence, int]] = ()) -> None:  # pyright: ignore[reportArgumentType]
        """One step: each of `decode` (with drafts, when the config has them), `count` positions for each chunk.

        Applies the outputs. Under speculation the starts of decode rows are too high, as the scheduler's may be.
        """
        most, step, entries = self.config.max_draft, self.step, [(s, 1) for s in decode] + list(chunks)
        step.header[:] = 0
        step.header[step.NUM_ROWS] = len(entries)
        step.header[step.NUM_DECODE] = len(decode)
        num_appends = 0
        for i, (sequence, count) in enumerate(entries):
            is_decode = i < len(decode)
            drafts = most if is_decode else 0
            for index, block in self._grow(sequence, sequence.num_computed + count + drafts):
                step.append_rows[num_appends] = sequence.row
                step.append_index[num_appends] = index
                step.append_blocks[num_appends] = block
                num_appends += 1
            end = sequence.num_computed + count
            at_end = end == len(sequence.tokens)
            sampled = at_end and sequence.params.max_tokens > 0
            embeds = at_end and sequence.params.embedding_size > 0
            to_score = sequence.num_computed < self.table.num_prompt[sequence.row] - 1
            scores = to_score and sequence.params.prompt_logprobs >= 0
            step.rows[i] = sequence.row
            step.generation[i] = self._generations[sequence.row]
            step.start[i], step.num_tokens[i], step.num_draft[i] = sequence.num_computed, count + drafts, drafts
            step.flags[i] = StepFlag.NEW * sequence.new | StepFlag.SAMPLE * sampled | StepFlag.LAST_TOKEN * is_decode
            step.flags[i] |= StepFlag.SCORE * scores | StepFlag.EMBED * embeds
            if drafts:
                step.start[i] += 3
                step.flags[i] |= StepFlag.UPPER_BOUND
            sequence.new = False
            sequence.num_computed = end
        step.header[step.NUM_APPENDS] = num_appends
        self.runner.run(step, self.output)
        for i, (sequence, _) in enumerate(entries):
            sequence.report += self.output.report_of(i).tolist()
            drawn = self.output.tokens[i, : max(0, self.output.num_accepted[i])].tolist()
            sequence.tokens += drawn
            sequence.outputs += drawn
            sequence.num_computed += max(0, len(drawn) - 1)

    def generate(self, sequences: list[Sequence], num_outputs: int, chunk: int = 10_000) -> None:
        """Prefill and decode all of them together until each has `num_outputs`."""
        while waiting := [s for s in sequences if len(s.outputs) < num_outputs]:
            decode = [s for s in waiting if s.outputs]
            prefill = [(s, min(chunk, len(s.tokens) - s.num_computed)) for s in waiting if not s.outputs]
            self.run(decode, prefill)

    def answer(self, prompts: list[list[int]], params: SamplingParams, num_outputs: int, chunk: int) -> list[Sequence]:
        """`generate`, for prompts that are admitted first."""
        sequences = [self.admit(prompt, params) for prompt in prompts]
        self.generate(sequences, num_outputs, chunk)
        return sequences

    def _grow(self, sequence: Sequence, length: int) -> list[tuple[int, int]]:
        added = []
        while len(sequence.blocks) * self.config.block_size < length:
            added.append((len(sequence.blocks), self._free[0]))
            sequence.blocks.append(self._free.pop(0))
        return added
