"""Drafts from an EAGLE head (`eagle_head.py`), which reads the target's hidden states.

The head's keys and values lie in a pool of their own with the target's block numbers: position p of a row is kept
where the target keeps it, so blocks that the prefix cache shares bring their draft state along. What the head writes
for its own drafts is overwritten when a position is entered, with the target's hidden states.

Positions are entered when a row is asked for drafts (`catch_up`): until then their states wait (`backlog.py`), so a
head that is not asked costs next to nothing. Prompts, which would not find room there, are entered at once while the
head is in use for batches of this size, and otherwise as far as they find room.

A block that came from a tier, or from a time when the head was not in use, is a hole: what was never entered cannot be
made up for, since the target's hidden states of it are gone. The head does without: it attends to those blocks of a
row alone that were entered, which is to guess worse. Its layer's keys and values depend on nothing but their
own position, so what it enters behind a hole is as good as ever. `_entered` says which blocks have no hole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from slipring.kernels.int8_linear import int8_linear, pack_int8
from slipring.shm.spec import ModelSpec
from slipring.shm.table import BatchTable
from slipring.workers.batch import Batch
from slipring.workers.batch_builder import BatchBuilder
from slipring.workers.entries import Entries, tokens_of
from slipring.workers.kv_cache import KvCache
from slipring.workers.models.llama import Llama
from slipring.workers.rows import Rows
from slipring.workers.sampler import Sampler
from slipring.workers.speculation.backlog import Backlog, Positions, backlog_size
from slipring.workers.speculation.eagle_head import MATRICES, EagleHead
from slipring.workers.speculation.present_blocks import PresentBlocks
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer
from slipring.workers.speculation.tree_search import CHAINS, Fed, Guessed, TreeSearch, TreeShape
from slipring.workers.speculation.verify import Runs

_SHORT = 8
"""Positions of a row that are entered like those of a decode step, beside other rows."""
_IN_USE, _RATE = 0.1, 0.05
"""Share of the latest decode steps that drafts were asked for from which on prompts are entered at once, and weight of
each step in it. Steps in which others drafted alone say nothing."""
_FEW_ROWS, _MORE_ROWS = 8, 2.0
"""In a step of more rows than these, and than so many times those that drafts were lately asked for, prompts wait:
drafts seldom pay in a batch that is larger than those before, and its prompts are many."""


@dataclass(frozen=True, slots=True)
class Target:
    """What the head needs of the worker it runs in."""

    spec: ModelSpec
    model: Llama
    kv: KvCache
    table: BatchTable
    rows: Rows
    builder: BatchBuilder
    sampler: Sampler


class EagleProposer(NullProposer):
    is_free = False

    def __init__(self, target: Target, head: EagleHead, shape: TreeShape = CHAINS) -> None:
        """`head`: in float32, as it was loaded."""
        self._target, self._shape = target, shape
        model = target.model
        dtype, num_rows = model.embedding.dtype, target.table.shape.num_rows
        weights = {"output": model.output_rows(head.token_ids)} | head.weights
        cast = {name: weight.to(dtype) for name, weight in weights.items()}
        self._cos_sin = model.cos_sin if head.cos_sin is None else head.cos_sin.to(dtype)
        self._packed = packed = {name: pack_int8(cast[name]) for name in MATRICES if name in cast}
        wide = {name: weight.wide for name, weight in packed.items()}
        self._head = replace(head, weights=cast | wide, multiply=lambda x, name: int8_linear(x, packed[name]))
        model.taps = head.taps
        kv, one_layer = target.kv, msgspec.structs.replace(target.spec, num_layers=1)
        self._kv = KvCache(one_layer, kv.num_blocks, kv.block_size, dtype)
        self._feature = torch.zeros((num_rows, target.spec.hidden_size), dtype=dtype)
        """The head's guess of the target's feature at each row's last token."""
        self._next = np.full(num_rows, -1)
        """Position that each row's guess is of: right behind what was entered; -1: nothing was."""
        width = model.embedding.shape[1] * (len(head.taps) or 1)
        self._backlog = Backlog(num_rows, backlog_size(kv.block_size), width, dtype)
        self._asked = 0
        """Rows that the step under way asked drafts for."""
        self._use, self._rows = 1.0, 0.0
        """Share of the latest decode steps that asked, and how many rows these asked for."""
        self._entered: NDArray[np.bool_] = np.zeros(kv.num_blocks, bool)
        """Blocks whose positions have all been entered."""
        self._past = PresentBlocks(target.table, target.rows, target.builder)

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._next[row] = -1
        self._backlog.forget(row)

    def overwritten(self, blocks: IntArray) -> None:
        self._entered[blocks] = False

    @torch.inference_mode()
    def saw(self, entries: Entries, batch: Batch, hidden: Tensor, runs: Runs | None) -> None:
        """Keep what is known for certain now."""
        known = self._known(entries, batch, hidden, runs)
        self._entered[self._blocks(known.rows, known.start, known.start + known.count, partly=True)] = False
        later = known.count > 0
        drafted = np.flatnonzero(entries.drafts.num)
        if self._asked:
            self._use += (1 - self._use) * _RATE
            self._rows += (self._asked - self._rows) * _RATE
            self._asked = 0
        elif entries.num_decode and not len(drafted):
            self._use -= self._use * _RATE
        if self._use > _IN_USE:
            # Somebody else drafts for a row (a grammar, or what it has written before), and may not for long.
            rows, count = known.rows[drafted], known.count[drafted]
            self._enter(self._backlog.take(rows[self._backlog.num(rows) + count > self._backlog.capacity]))
            prompts = np.flatnonzero(later & (np.arange(len(later)) >= entries.num_decode))
            if len(prompts) and len(later) <= max(_FEW_ROWS, self._rows * _MORE_ROWS):
                later[prompts] = False
                self._enter(self._backlog.take(known.rows[prompts]))
                self._enter(known.of(prompts))
        self._backlog.put(known.of(np.flatnonzero(later)))

    @torch.inference_mode()
    def catch_up(self, rows: IntArray) -> None:
        self._enter(self._backlog.take(rows))

    @torch.inference_mode()
    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        self._asked += int((most > 0).sum())
        most = np.where(self._next[rows] == self._target.rows.position[rows], most, 0)
        at = np.flatnonzero(most)
        if not len(at):
            return Drafts.none(len(rows))
        of_rows = rows[at]
        search = TreeSearch(self._shape, of_rows, self._target.rows.position[of_rows], most[at])
        found = search.run(self._feature[torch.from_numpy(of_rows)], partial(self._read, of_rows), self._guess)
        return found.of(at, len(rows))

    def _read(self, rows: IntArray, fed: Fed, feature: Tensor) -> Tensor:
        """One guess more behind each of these drafts, from the feature that it was guessed from."""
        num_rows, width = fed.tokens.shape
        entries = Entries(rows, fed.start, fed.num, num_rows, Drafts.none(num_rows, width), fed.num, fed.branches)
        batch, tokens = self._past.build_in(entries, self._kv), fed.tokens[np.arange(width) < fed.num[:, None]]
        embedded = F.embedding(torch.from_numpy(tokens), self._target.model.embedding)
        order = torch.argsort(batch.sample_at)  # the entries' tokens in the batch's order
        guessed = self._forward(batch, embedded.index_select(0, order), feature.index_select(0, order))
        return guessed.index_select(0, batch.sample_at)

    def _guess(self, feature: Tensor, rows: IntArray, position: IntArray, count: int) -> Guessed:
        scores, token_ids = self._head.scores(feature).float(), self._head.token_ids
        guesses = self._target.sampler.guesses(scores, token_ids, rows, position, count)
        return token_ids[guesses.at].numpy(), guesses.logp.double().numpy(), guesses.proposals

    def _states(self, hidden: Tensor, at: Tensor) -> Tensor:
        """[T, width]: what the head reads of the last forward pass, rows `at` of its batch."""
        model = self._target.model
        if self._head.taps:
            return torch.cat([tapped.index_select(0, at) for tapped in model.tapped], 1)
        return model.normed(hidden, at)

    def _forward(self, batch: Batch, embedded: Tensor, feature: Tensor) -> Tensor:
        (pools,), cos_sin, scale = self._kv.pools, self._cos_sin, self._target.spec.head_dim**-0.5

        def attend(heads: Tensor, value: Tensor) -> Tensor:
            return batch.attention.layer(heads, value, cos_sin, pools, scale)

        return self._head.forward(embedded, feature, attend)

    def _following(self, entries: Entries, runs: Runs | None, entry: IntArray, place: IntArray) -> IntArray:
        """The token after each computed position: the drawn one, or the prompt's next."""
        table = self._target.table.token_ids
        position = np.minimum(entries.start[entry] + place + 1, table.shape[1] - 1)
        following = table[entries.rows[entry], position].astype(np.int64)
        if runs is not None:
            # Of a decode entry every position was followed by a draw, of a prompt's last chunk only the last one.
            draw = place - (entries.num_tokens - runs.count)[entry]
            draw = np.where(entry < entries.num_decode, place, draw)
            drawn = (draw >= 0) & (runs.count[entry] > 0)
            following[drawn] = runs.tokens[entry[drawn], draw[drawn]]
        return following

    def _known(self, entries: Entries, batch: Batch, hidden: Tensor, runs: Runs | None) -> Positions:
        """The entries' positions that are certain: all of a prompt's, and those that tokens were drawn behind."""
        assert batch.entry_at is not None
        drew = np.zeros(len(entries.rows), np.int64) if runs is None else runs.count
        decode = np.arange(len(entries.rows)) < entries.num_decode
        count = np.where(decode, drew, entries.num_tokens)
        entry, place = tokens_of(count)
        token = place.copy()
        if runs is not None:
            drawn = decode[entry]
            token[drawn] = runs.path[entry[drawn], place[drawn]]
        states = self._states(hidden, torch.from_numpy(batch.entry_at[entry] + token))
        return Positions(entries.rows, entries.start, count, states, self._following(entries, runs, entry, place))

    def _enter(self, positions: Positions) -> None:
        """Enter them, and guess on from each row's last one. A row that does not go on where the head has come to
        begins anew with a block; so do rows that were admitted."""
        size = self._target.table.shape.block_size
        skip = np.where(positions.start == self._next[positions.rows], 0, -positions.start % size)
        left = np.maximum(positions.count - skip, 0)
        order = np.argsort(left > _SHORT, kind="stable")
        order = order[left[order] > 0]
        new = positions.of(order, skip[order])
        rows, start, end = new.rows, new.start, new.start + new.count
        if not len(rows):
            return
        for i in np.flatnonzero(start != self._next[rows]).tolist():
            before = self._target.rows.block_table[rows[i], : start[i] // size]
            self._past.begin(int(rows[i]), self._entered[before])
        num_short = int((new.count <= _SHORT).sum())
        chains = Drafts.none(num_short, _SHORT - 1)
        entries = Entries(rows, start, new.count, num_short, chains, np.ones(len(rows), np.int64))
        mine = self._past.build_in(entries, self._kv)
        assert mine.entry_at is not None
        entry, place = tokens_of(new.count)
        order = np.empty(len(entry), np.int64)
        order[mine.entry_at[entry] + place] = np.arange(len(entry))
        embedded = F.embedding(torch.from_numpy(new.following[order]), self._target.model.embedding)
        states = new.states.index_select(0, torch.from_numpy(order))
        feature = self._head.first(states, states.chunk(len(self._head.taps) or 1, 1))
        guessed = self._forward(mine, embedded, feature)
        self._feature[torch.from_numpy(rows)] = guessed = guessed.index_select(0, mine.sample_at)
        # What is not a number, here or in the past that was read, makes a row's guesses worthless, but no other's.
        good = torch.isfinite(guessed).all(1).numpy()
        self._next[rows] = np.where(good, end, -1)
        self._entered[self._blocks(rows[good], start[good], end[good])] = True

    def _blocks(self, rows: IntArray, start: IntArray, end: IntArray, partly: bool = False) -> IntArray:
        """Blocks that hold these positions [n] of these rows; without `partly` only those that end before `end`."""
        size = self._target.table.shape.block_size
        first = start // size
        entry, place = tokens_of(np.where(end > start, (end + (size - 1) * partly) // size - first, 0))
        return self._target.rows.block_table[rows[entry], first[entry] + place].astype(np.int64)
