"""Drafts from Medusa heads (`medusa_head.py`): all of a chain at once, from the target's last hidden state."""

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
from slipring.workers.speculation.verify import Runs


class MedusaProposer(NullProposer):
    is_free = False

    def __init__(self, model: Llama, rows: Rows, sampler: Sampler, medusa: MedusaHeads) -> None:
        """`medusa`: in float32, as it was loaded."""
        self._model, self._rows, self._sampler = model, rows, sampler
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
        medusa = self._medusa
        most = np.where(self._ready[rows], np.minimum(most, len(medusa.heads)), 0)
        width = int(most.max(initial=0))
        drafts = Drafts(np.zeros((len(rows), width), np.int64), most, worth=np.zeros((len(rows), width)))
        assert drafts.worth is not None
        worth = np.ones(len(rows))
        for place in range(width):
            at = np.flatnonzero(most > place)
            x = medusa.hidden(place, self._hidden[torch.from_numpy(rows[at])])
            scores = linear(x, medusa.outputs[place]).float()
            position = self._rows.position[rows[at]] + place + 1
            guess, chance = self._sampler.guesses(scores, medusa.token_ids, rows[at], position, 1)
            drafts.tokens[at, place] = medusa.token_ids[guess[:, 0]].numpy()
            worth[at] *= chance[:, 0].double().exp().numpy()
            drafts.worth[at, place] = worth[at]
        return drafts
