"""Drafts from an EAGLE head (`eagle_head.py`), which reads the target's hidden states.

The head's keys and values lie in a pool of their own with the target's block numbers: position p of a row is kept
where the target keeps it, so blocks that the prefix cache shares bring their draft state along. Every step's accepted
positions are entered (`saw`), with the target's hidden states; what the head writes for its own drafts is overwritten
then.

A block that came from a tier, or from a time when the head was not run, is a hole: what was never entered cannot be
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
from slipring.workers.speculation.eagle_head import MATRICES, EagleHead
from slipring.workers.speculation.present_blocks import PresentBlocks
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer
from slipring.workers.speculation.tree_search import CHAINS, Fed, FloatArray, TreeSearch, TreeShape
from slipring.workers.speculation.verify import Runs


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
        packed = {name: pack_int8(cast[name]) for name in MATRICES if name in cast}
        wide = {name: weight.wide for name, weight in packed.items()}
        self._head = replace(head, weights=cast | wide, multiply=lambda x, name: int8_linear(x, packed[name]))
        model.taps = head.taps
        kv, one_layer = target.kv, msgspec.structs.replace(target.spec, num_layers=1)
        (self._pools,) = KvCache(one_layer, kv.num_blocks, kv.block_size, dtype).pools
        self._feature = torch.zeros((num_rows, target.spec.hidden_size), dtype=dtype)
        """The head's guess of the target's feature at each row's last token."""
        self._ready: NDArray[np.bool_] = np.zeros(num_rows, bool)
        """Rows whose guess is of their last token."""
        self._begun: NDArray[np.bool_] = np.zeros(num_rows, bool)
        self._entered: NDArray[np.bool_] = np.zeros(kv.num_blocks, bool)
        """Blocks whose positions have all been entered."""
        self._past = PresentBlocks(target.table, target.rows, target.builder)

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._ready[row] = self._begun[row] = False

    def overwritten(self, blocks: IntArray) -> None:
        self._entered[blocks] = False

    @torch.inference_mode()
    def saw(self, entries: Entries, batch: Batch, hidden: Tensor, runs: Runs | None) -> None:
        """Enter what is known for certain now, and guess on from each row's last token."""
        target, drew = self._target, np.zeros(len(entries.rows), np.int64) if runs is None else runs.count
        decode = np.arange(len(entries.rows)) < entries.num_decode
        count = np.where(decode, drew, entries.num_tokens)
        chains = Drafts.none(entries.num_decode, entries.drafts.tokens.shape[1])
        known = Entries(entries.rows, entries.start, count, entries.num_decode, chains, (drew > 0).astype(int))
        if not count.any():
            return
        self._enter(known)
        mine = self._past.build(known)
        assert batch.entry_at is not None and mine.entry_at is not None
        entry, place = tokens_of(count)
        at = np.empty(len(entry), np.int64)
        token = place.copy()
        if runs is not None:
            drawn = entry < entries.num_decode
            token[drawn] = runs.path[entry[drawn], place[drawn]]
        at[mine.entry_at[entry] + place] = batch.entry_at[entry] + token
        following = np.empty(len(entry), np.int64)
        following[mine.entry_at[entry] + place] = self._following(entries, runs, entry, place)
        embedded = F.embedding(torch.from_numpy(following), target.model.embedding)
        guessed = self._forward(mine, embedded, self._first(hidden, torch.from_numpy(at)))
        drawn = np.flatnonzero(drew > 0)
        self._feature[torch.from_numpy(entries.rows[drawn])] = guessed.index_select(0, mine.sample_at)
        self._ready[entries.rows[drawn]] = True

    @torch.inference_mode()
    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        most = np.where(self._ready[rows], most, 0)
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
        batch, tokens = self._past.build(entries), fed.tokens[np.arange(width) < fed.num[:, None]]
        embedded = F.embedding(torch.from_numpy(tokens), self._target.model.embedding)
        order = torch.argsort(batch.sample_at)  # the entries' tokens in the batch's order
        guessed = self._forward(batch, embedded.index_select(0, order), feature.index_select(0, order))
        return guessed.index_select(0, batch.sample_at)

    def _guess(self, feature: Tensor, rows: IntArray, position: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        scores, token_ids = self._head.scores(feature).float(), self._head.token_ids
        at, logp = self._target.sampler.guesses(scores, token_ids, rows, position, count)
        return token_ids[at].numpy(), logp.double().numpy()

    def _first(self, hidden: Tensor, at: Tensor) -> Tensor:
        """The target's features of the last forward pass, rows `at` of its batch."""
        model = self._target.model
        if self._head.taps:
            return self._head.first(hidden, [tapped.index_select(0, at) for tapped in model.tapped])
        return self._head.first(model.normed(hidden, at), ())

    def _forward(self, batch: Batch, embedded: Tensor, feature: Tensor) -> Tensor:
        cos_sin, scale = self._cos_sin, self._target.spec.head_dim**-0.5

        def attend(heads: Tensor, value: Tensor) -> Tensor:
            return batch.attention.layer(heads, value, cos_sin, self._pools, scale)

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

    def _enter(self, known: Entries) -> None:
        """Which blocks this step fills, and what rows that begin with it have before them."""
        size, table = self._target.table.shape.block_size, self._target.rows.block_table
        first, last = known.start // size, known.end // size
        entry, place = tokens_of(last - first)
        self._entered[table[known.rows[entry], first[entry] + place]] = True
        partly = (known.end % size != 0) & (known.num_tokens > 0)
        self._entered[table[known.rows[partly], last[partly]]] = False
        for i in np.flatnonzero(~self._begun[known.rows]).tolist():
            row = int(known.rows[i])
            self._begun[row] = True
            self._past.begin(row, self._entered[table[row, : first[i]]])
