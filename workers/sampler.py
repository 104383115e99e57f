"""The stateless sampler: logits of a step's sampled rows to tokens and log-probabilities.

A row's token depends on its own logits, parameters, seed and position alone. What is kept per row (sampling columns,
edits, and counts for rows with penalties) is loaded when the row is admitted and is a function of its tokens, so a
readmitted row goes on as if nothing had happened.

Order: logit bias, masks, penalties, temperature, min_p, top_k, top_p, Gumbel noise. Log-probabilities are those of
the unmodified logits. A row whose logits are not finite, or whose masks leave no token, draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.kernels.logprobs import top_logprobs
from slipring.kernels.philox import noise_for_tokens
from slipring.kernels.rejection import accept_or_draw
from slipring.kernels.sampling import GREEDY_BELOW, DrawParams, apply_penalties, draw
from slipring.kernels.token_mask import apply_token_mask
from slipring.shm.params import MAX_LOGPROBS
from slipring.shm.table import BatchTable
from slipring.shm.wire import NO_MATCH, NO_TOKEN, NON_FINITE
from slipring.workers.constraints import Constraints
from slipring.workers.penalties import PenaltyCounts
from slipring.workers.row_edits import RowEdits
from slipring.workers.speculation.proposer import PROPOSAL

IntArray = NDArray[np.int64]
_GUESS_CANDIDATES = 32
"""Best tokens of a draft model that noise is added to."""

_COLUMNS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "choice",
    "logprobs",
)


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens are to be drawn, one for each row: after its last token, or after a draft that has been accepted."""

    rows: IntArray
    """[S]"""
    position: IntArray
    """[S]: the drawn token's index in its sequence."""
    num_outputs: IntArray
    """[S]: the row's outputs before it."""
    place: IntArray
    """[S]: 0 after the row's last token, 1 + i after its draft i: which of its masks counts."""
    drawn: DrawnDrafts | None = None


@dataclass(frozen=True, slots=True)
class DrawnDrafts:
    """Drafts that stand behind places and were drawn, not chosen: by rows with a temperature, under rejection
    sampling."""

    at: IntArray
    """[P]: indices of the places, rising."""
    tokens: IntArray
    """[P]"""
    proposals: NDArray[np.void]
    """[P, C] of `PROPOSAL`"""


@dataclass(frozen=True, slots=True)
class Guesses:
    """R rows' guesses of a draft model, k each."""

    at: Tensor
    """[R, k]: indices of the tokens, best first."""
    logp: Tensor
    """[R, k]: logarithms of their chances."""
    proposals: NDArray[np.void] | None
    """[R, C] of `PROPOSAL`, under rejection sampling: what they were drawn from; chances are 0 for greedy rows."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the places `at` only; natural logarithms of the raw distribution."""

    at: IntArray
    """[L]: indices into the places."""
    logprob: NDArray[np.float32]
    """[L], of the drawn token."""
    rank: IntArray
    """[L]; 1 for the most likely token."""
    top_ids: IntArray
    """[L, k], best first."""
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn, in the order of the places."""

    tokens: IntArray
    """[S]"""
    failure: IntArray
    """[S]: why nothing could be drawn: NON_FINITE, NO_MATCH or NO_TOKEN; 0 where something was."""
    logprobs: Logprobs | None

    @property
    def ok(self) -> NDArray[np.bool_]:
        """[S]; False where nothing could be drawn and the token means nothing."""
        return self.failure == 0


class Sampler:
    """Holds every row's sampling columns, [num_rows] each."""

    def __init__(
        self, table: BatchTable, vocab_size: int, constraints: Constraints, rejection_sampling: bool = False
    ) -> None:
        self._table = table
        self._rejection_sampling = rejection_sampling
        self._constraints = constraints
        self._columns = {name: getattr(table, name).copy() for name in _COLUMNS}
        self._penalties = PenaltyCounts(table.shape.num_rows, vocab_size)
        self._edits = RowEdits(table, torch.from_numpy)

    def admit(self, row: int) -> None:
        """Load a row's parameters, and rebuild its counts from the tokens known at admission."""
        table, columns = self._table, self._columns
        for name in _COLUMNS:
            columns[name][row] = getattr(table, name)[row]
        self._edits.admit(row)
        self._admit_penalties(row)
        self._constraints.admit(row)

    def sample(self, logits: Tensor, places: Places) -> Draws:
        """logits [S, V]. May overwrite them. What is drawn counts only once `count` is told."""
        rows = places.rows
        scores = logits.float()
        best, tokens = scores.max(dim=1)
        ok = torch.isfinite(best)
        failure = np.where(ok.numpy(), 0, NON_FINITE)
        if not ok.all():
            scores[~ok] = 0.0
        asked = np.flatnonzero(self._columns["logprobs"][rows] >= 0)
        raw = scores[torch.from_numpy(asked)] if len(asked) else None
        changed = self._adjust(scores, places)
        masks = self._constraints.masks(rows, places.place)
        if len(masks.at):
            apply_token_mask(scores, torch.from_numpy(masks.at), torch.from_numpy(masks.allowed))
        if changed or len(masks.at):
            best, tokens = scores.max(dim=1)
            left = torch.isfinite(best)
            failure[(ok & ~left).numpy()] = NO_TOKEN
            failure[masks.failed] = NO_MATCH
            ok &= left
            ok[masks.failed] = False
            if not ok.all():
                scores[~ok] = 0.0
        self._draw(scores, tokens, places)
        drawn = tokens.numpy()
        logprobs = None if raw is None else self._logprobs(raw, asked, drawn, rows)
        return Draws(drawn, failure, logprobs)

    def guesses(self, scores: Tensor, token_ids: Tensor, rows: IntArray, position: IntArray, count: int = 1) -> Guesses:
        """What a draft model's scores [R, V'] of the tokens `token_ids` [V'] say the target will draw, `count` each.

        The target's own noise is added for rows with a temperature, so that like scores lead to like tokens. The
        chances are those of scores that are off by as much as a softmax thinks. Under rejection sampling they must not
        tell what was drawn: then they say how sure the scores are on the whole.
        """
        best, at = scores.topk(min(max(_GUESS_CANDIDATES, count), scores.shape[1]), dim=1)
        params, total = self._draw_params(rows, position), scores.logsumexp(1)
        temperature = params.temperature.where(params.temperature >= GREEDY_BELOW, 0.0)
        left = total + (-torch.expm1((best.logsumexp(1) - total).clamp(max=-1e-7))).log()
        if temperature.any():
            noise = noise_for_tokens(token_ids[at], params.seed, params.position, params.choice)
            plain, best = best, best + temperature.unsqueeze(1) * noise
        chosen, order = best.topk(min(count, best.shape[1]), dim=1)
        norm = torch.logaddexp(best.logsumexp(1), left).unsqueeze(1)
        found, logp = at.gather(1, order), (chosen - norm).clamp(max=0.0)
        if not self._rejection_sampling:
            return Guesses(found, logp, None)
        proposals = np.zeros(at.shape, PROPOSAL)
        if temperature.any():
            sampled = (temperature > 0).unsqueeze(1)
            chances = (plain / temperature.unsqueeze(1)).softmax(1)  # greedy rows hold no numbers
            logp = torch.where(sampled, (chances**2).sum(1, keepdim=True).log(), logp)
            proposals["token_id"] = token_ids[at].numpy()
            proposals["chance"] = chances.where(sampled, 0.0).numpy()
        return Guesses(found, logp, proposals)

    def count(self, rows: IntArray, tokens: IntArray) -> None:
        """These tokens [S] are the next ones of the rows beside them, which are distinct. Grammars are told elsewhere:
        their masks are made ahead, for every draft."""
        self._penalties.count(rows, tokens)
        self._edits.count(rows, torch.from_numpy(tokens))

    def _admit_penalties(self, row: int) -> None:
        table, columns = self._table, self._columns
        wanted = (
            columns["repetition_penalty"][row] != 1
            or columns["presence_penalty"][row] != 0
            or columns["frequency_penalty"][row] != 0
        )
        known = table.token_ids[row, : table.num_known[row]]
        self._penalties.admit(row, wanted, known[: table.num_prompt[row]], known[table.num_prompt[row] :])

    def _adjust(self, scores: Tensor, places: Places) -> bool:
        """Edits and penalties, in place; whether anything may have changed."""
        rows = places.rows
        changed = self._edits.apply(scores, rows, places.num_outputs)
        if len(at := np.flatnonzero(self._penalties.slot[rows] >= 0)):
            self._penalise(scores, at, rows[at])
            changed = True
        return changed

    def _penalise(self, scores: Tensor, at: IntArray, rows: IntArray) -> None:
        index = torch.from_numpy(at)
        penalised = scores[index]
        prompt_mask, output_counts = self._penalties.take(rows)
        apply_penalties(
            penalised,
            prompt_mask,
            output_counts,
            repetition=self._column("repetition_penalty", rows),
            presence=self._column("presence_penalty", rows),
            frequency=self._column("frequency_penalty", rows),
        )
        scores[index] = penalised

    def _draw(self, scores: Tensor, tokens: Tensor, places: Places) -> None:
        """Overwrite the greedy `tokens` of rows with a temperature by drawn ones."""
        rows, position = places.rows, places.position
        at = np.flatnonzero(self._columns["temperature"][rows] >= GREEDY_BELOW)
        if (drawn := places.drawn) is not None:
            index, params = torch.from_numpy(drawn.at), self._draw_params(rows[drawn.at], position[drawn.at])
            token_ids, chances = (np.ascontiguousarray(drawn.proposals[name]) for name in ("token_id", "chance"))
            drafts = (torch.from_numpy(each) for each in (drawn.tokens, token_ids, chances))
            tokens[index] = accept_or_draw(scores[index], params, *drafts)
            at = np.setdiff1d(at, drawn.at)
        if not len(at):
            return
        index = torch.from_numpy(at)
        chosen = scores if len(at) == len(rows) else scores[index]
        tokens[index] = draw(chosen, self._draw_params(rows[at], position[at]))

    def _draw_params(self, rows: IntArray, position: IntArray) -> DrawParams:
        seed = np.ascontiguousarray(self._columns["seed"][rows]).view("<u4").reshape(-1, 2)
        return DrawParams(
            temperature=self._column("temperature", rows),
            top_k=self._column("top_k", rows).long(),
            top_p=self._column("top_p", rows),
            min_p=self._column("min_p", rows),
            seed=torch.from_numpy(seed.astype(np.int64)),
            position=torch.from_numpy(position),
            choice=self._column("choice", rows).long(),
        )

    def _column(self, name: str, rows: IntArray) -> Tensor:
        return torch.from_numpy(self._columns[name][rows])

    def _logprobs(self, raw: Tensor, at: IntArray, drawn: IntArray, rows: IntArray) -> Logprobs:
        count = min(MAX_LOGPROBS, int(self._columns["logprobs"][rows[at]].max()), raw.shape[1])
        found = top_logprobs(raw, torch.from_numpy(drawn[at]), count)
        return Logprobs(
            at, found.logprob.numpy(), found.rank.numpy(), found.top_ids.numpy(), found.top_logprobs.numpy()
        )
