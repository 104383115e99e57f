"""Drafts from Medusa heads (`medusa_head.py`): all of them from the target's last hidden state.

The heads do not know of each other's guesses: in a tree the same candidates stand behind every draft of a level.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.kernels.linear import linear, pack_weight
from slipring.workers.batch import Batch
from slipring.workers.entries import Entries
from slipring.workers.models.llama import Llama
from slipring.workers.rows import Rows
from slipring.workers.sampler import Sampler
from slipring.workers.speculation.medusa_head import Block, MedusaHeads
from slipring.workers.speculation.proposer import Drafts, IntArray, NullProposer
from slipring.workers.speculation.tree_search import CHAINS, Guessed, TreeSearch, TreeShape
from slipring.workers.speculation.verify import Runs


class MedusaProposer(NullProposer):
    is_free = False

    def __init__(
        self, model: Llama, rows: Rows, sampler: Sampler, medusa: MedusaHeads, shape: TreeShape = CHAINS
    ) -> None:
        """`medusa`: in float32, as it was loaded. Raises ValueError for a fixed tree that is deeper than the heads."""
        self._model, self._rows, self._sampler = model, rows, sampler
        deepest = len(medusa.heads)
        if shape.paths and len(shape.paths[-1]) > deepest:
            raise ValueError(f"speculative_token_tree is {len(shape.paths[-1])} deep, but there are {deepest} heads")
        self._shape = shape if shape.depth is None else replace(shape, depth=min(shape.depth, deepest))
        dtype, num_rows = model.embedding.dtype, len(rows.position)
        outputs = medusa.outputs or [model.output_rows(medusa.token_ids)]
        packed = [pack_weight(output.to(dtype)) for output in outputs]
        if len(packed) < len(medusa.heads):
            packed *= len(medusa.heads)
        heads = [
            [Block(pack_weight(block.weight.to(dtype)), block.bias.to(dtype)) for block in blocks]
            for blocks in medusa.heads
        ]
        self._medusa = replace(medusa, heads=heads, outputs=packed, multiply=linear)
        self._hidden = torch.zeros((num_rows, model.embedding.shape[1]), dtype=dtype)
        """The target's normed hidden state before each row's last token."""
        self._ready: NDArray[np.bool_] = np.zeros(num_rows, bool)

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._ready[row] = False

    @torch.inference_mode()
    def saw(self, entries: Entries, batch: Batch, hidden: Tensor, runs: Runs | None) -> None:
        """Keep the hidden state that each row's last token was drawn from."""
        if runs is None or not len(drew := np.flatnonzero(runs.count)):
            return
        assert batch.entry_at is not None
        of_draft = runs.path[drew, runs.count[drew] - 1]
        token = np.where(drew < entries.num_decode, of_draft, entries.num_tokens[drew] - 1)
        at = torch.from_numpy(batch.entry_at[drew] + token)
        rows = entries.rows[drew]
        self._hidden[torch.from_numpy(rows)] = self._model.normed(hidden, at)
        self._ready[rows] = True

    @torch.inference_mode()
    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        most = np.where(self._ready[rows], most, 0)
        if self._shape.depth is None:
            most = np.minimum(most, len(self._medusa.heads))
        at = np.flatnonzero(most)
        if not len(at):
            return Drafts.none(len(rows))
        search = TreeSearch(self._shape, rows[at], self._rows.position[rows[at]], most[at])
        found = search.run(self._hidden[torch.from_numpy(rows[at])], lambda _, hidden: hidden, self._guess)
        return found.of(at, len(rows))

    def _guess(self, hidden: Tensor, rows: IntArray, position: IntArray, count: int) -> Guessed:
        medusa, place = self._medusa, int(position[0] - self._rows.position[rows[0]]) - 1
        # A row stands here once for each of its drafts, and its head says the same of all.
        _, first, again = np.unique(rows, return_index=True, return_inverse=True)
        x = medusa.hidden(place, hidden.index_select(0, torch.from_numpy(first)))
        scores = linear(x, medusa.outputs[place]).float()
        guesses = self._sampler.guesses(scores, medusa.token_ids, rows[first], position[first], count)
        proposals = None if guesses.proposals is None else guesses.proposals[again]
        return medusa.token_ids[guesses.at].numpy()[again], guesses.logp.double().numpy()[again], proposals
