"""`Constraints`: the rows whose output must match a grammar, and the token masks that see to it.

A mask thread does the work while the device runs the next forward pass: it accepts each row's tokens as soon as they
are drawn and fills the row's next mask, and one behind each draft; `masks` waits for it only right before the next
draw. Jobs run in the order in which they are given, so a mask is never older than its row's last token.

min_tokens, and a request that ignores ends of sequence, forbid stop tokens for as long as the grammar leaves anything
else: an output that is complete and cannot go on ends.

A row whose matcher has failed (llguidance's limits, met in the middle of an output) begins anew with its tokens, since
all rows of a grammar share these limits. One that fails again has no mask; its draw is reported as NO_MATCH, which ends
that request alone. So does one that would have to wait until too many others have begun anew, since everybody waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipring.shm.spec import ModelSpec
from slipring.shm.table import BatchTable
from slipring.workers.grammar import GrammarStore, Matcher, MatcherBatch, num_mask_words
from slipring.workers.speculation.proposer import Drafts

IntArray = NDArray[np.int64]
_Found = TypeVar("_Found")
_MOST_BUILDING_S = 5.0
"""Once grammars have been built for so long in a step, no other one is: the step would pass for a hang. The largest one
takes six seconds."""
Landed = Callable[[], tuple[NDArray[np.int64], NDArray[np.bool_]]]
"""Waits for draws; returns (tokens [N], whether each was drawn at all [N])."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Of the places of a draw (see `sampler.Places`)."""

    at: IntArray
    """[k]: indices of the places that a grammar binds."""
    allowed: NDArray[np.int32]
    """[k, num_mask_words], bits as in `Matcher`."""
    failed: IntArray
    """Indices, among `at`, of the places where the grammar cannot be followed; their masks allow everything."""


@dataclass(slots=True)
class _Bound:
    """A row that a grammar binds."""

    grammar_id: int
    matcher: Matcher
    outputs: list[int]
    """That the matcher has been told."""
    reluctant: NDArray[np.int64]
    """Tokens that are allowed only where nothing else is."""
    early: NDArray[np.int64]
    """Likewise, before `min_tokens` are out."""
    min_tokens: int

    def goes_on_with(self, matcher: Matcher, mask: NDArray[np.int32]) -> bool:
        """Another one, which is at the beginning; fill the mask of what follows. False: it has failed, too."""
        self.matcher = matcher
        matcher.accept(self.outputs)
        matcher.fill(mask)
        matcher.build.is_spent |= matcher.inner.is_error()
        return not matcher.inner.is_error()


class Constraints:
    """Everything but the jobs runs on the thread that drives the device."""

    def __init__(
        self, table: BatchTable, spec: ModelSpec, store: GrammarStore, max_draft: int = 0, num_threads: int = 1
    ) -> None:
        """`num_threads` fill masks."""
        num_rows, num_places = table.shape.num_rows, 1 + max_draft
        self._table, self._store = table, store
        self._eos = np.array(spec.eos_token_ids, np.int64)
        self._bound: dict[int, _Bound] = {}
        self._is_bound = np.zeros(num_rows, bool)
        self._failed = np.zeros((num_rows, num_places), bool)
        # By row and place. Pages of rows that no grammar ever binds are never touched.
        self._masks = np.zeros((num_rows, num_places, num_mask_words(spec.vocab_size)), np.int32)
        self._flat_masks = self._masks.reshape(num_rows * num_places, -1)
        self._batch = MatcherBatch(num_threads)
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._unfinished: list[Future[Any]] = []
        self._finds_forced = False
        self._forced: dict[int, list[int]] = {}
        """By row: tokens that must come next, for rows where something must."""
        self._advanced: Future[list[int]] | None = None
        """The last job that moved matchers on."""
        self._building_s = 0.0
        """That the mask thread has built grammars for since masks were asked for last."""

    def admit(self, row: int) -> None:
        """A row's admission begins: find its place in its grammar, if it has one, and fill its first mask."""
        grammar_id = int(self._table.grammar[row])
        self._is_bound[row] = grammar_id > 0
        if grammar_id > 0:
            known = self._table.token_ids[row, self._table.num_prompt[row] : self._table.num_known[row]]
            self._move_on(self._begin, row, grammar_id, known.tolist())

    def any(self, rows: IntArray) -> bool:
        return bool(self._is_bound[rows].any())

    def expect(self, rows: IntArray, drafts: Drafts) -> None:
        """The next draw for rows [D] has a place after each of these drafts too."""
        at = np.flatnonzero(self._is_bound[rows] & (drafts.num > 0))
        if len(at):
            num, follows = drafts.num, drafts.follows
            trees = [(drafts.tokens[i, : num[i]].tolist(), follows[i, : num[i]].tolist()) for i in at.tolist()]
            self._submit(self._look_ahead, rows[at].tolist(), trees)

    def masks(self, rows: IntArray, place: IntArray | None = None) -> Masks:
        """What rows [S] may draw at their places [S] (`sampler.Places`; None: after their last tokens).

        Waits for the masks. Raises what a job raised.
        """
        at = np.flatnonzero(self._is_bound[rows])
        if len(at):
            for job in self._unfinished:
                job.result()
            self._unfinished.clear()
            self._building_s = 0.0
        of_row = np.zeros(len(at), np.int64) if place is None else place[at]
        return Masks(at, self._masks[rows[at], of_row], at[self._failed[rows[at], of_row]])

    def accept(self, rows: IntArray, landed: Landed) -> None:
        """Tokens, which `landed` waits for, are the next ones of the rows [N] beside them; a row's stand in order."""
        at = np.flatnonzero(self._is_bound[rows])
        if len(at):
            self._move_on(self._advance, rows[at], at, landed)

    def look_for_forced(self) -> None:
        """`forced` will be asked. Where it has no use for an answer, the next step's is not looked for."""
        self._finds_forced = True

    def forced(self, rows: IntArray, most: IntArray) -> Drafts:
        """Tokens that must follow the last ones of rows [D], at most `most` [D]. Waits until all tokens are accepted,
        but for no mask. Raises what that raised."""
        at = np.flatnonzero(self._is_bound[rows] & (most > 0))
        self._finds_forced, found = len(at) > 0, {}
        if len(at) and self._advanced is not None:
            self._advanced.result()
            found = {i: tokens[: most[i]] for i in at.tolist() if (tokens := self._forced.get(int(rows[i])))}
        drafts = Drafts.none(len(rows), max(map(len, found.values()), default=0))
        for i, tokens in found.items():
            drafts.num[i] = len(tokens)
            drafts.tokens[i, : len(tokens)] = tokens
        return drafts

    def tokens(self, row: int) -> NDArray[np.int32]:
        """All of a row's that a grammar binds, the last ones drawn included. Waits until they are accepted; raises what
        that raised."""
        if self._advanced is not None:
            self._advanced.result()
        prompt = self._table.token_ids[row, : self._table.num_prompt[row]]
        return np.concatenate([prompt, np.array(self._bound[row].outputs, np.int32)])

    def _move_on(self, job: Callable[..., list[int]], *arguments: object) -> None:
        self._advanced = self._submit(job, *arguments)
        self._submit(self._fill_behind, self._advanced)

    def _submit(self, job: Callable[..., _Found], *arguments: object) -> Future[_Found]:
        future = self._jobs.submit(job, *arguments)
        self._unfinished.append(future)
        return future

    # --- on the mask thread -------------------------------------------------------------------------------------

    def _begin(self, row: int, grammar_id: int, outputs: list[int]) -> list[int]:
        table = self._table
        stop_ids = table.stop_ids[row, : table.num_stop_ids[row]].astype(np.int64)
        matcher = self._store.matcher(grammar_id)
        matcher.accept(outputs)
        self._bound[row] = _Bound(
            grammar_id,
            matcher,
            outputs,
            reluctant=np.setdiff1d(self._eos, stop_ids),
            early=stop_ids,
            min_tokens=int(table.min_tokens[row]),
        )
        self._failed[row] = False
        self._find_forced([row])
        return [row]

    def _advance(self, rows: IntArray, at: IntArray, landed: Landed) -> list[int]:
        tokens, drawn = landed()
        runs: dict[int, list[int]] = {}
        for row, token, is_drawn in zip(rows.tolist(), tokens[at].tolist(), drawn[at].tolist(), strict=True):
            if is_drawn and not self._failed[row, 0]:
                runs.setdefault(row, []).append(token)
                self._bound[row].outputs.append(token)
        for place in range(max(map(len, runs.values()), default=0)):
            going = [row for row, run in runs.items() if len(run) > place]
            self._batch.accept([self._bound[row].matcher for row in going], [runs[row][place] for row in going])
        self._find_forced(list(runs))
        return list(runs)

    def _find_forced(self, rows: list[int]) -> None:
        wanted = self._finds_forced
        for row in rows:
            self._forced[row] = self._bound[row].matcher.forced() if wanted else []

    def _fill_behind(self, advanced: Future[list[int]]) -> None:
        rows = advanced.result()
        num_places = self._masks.shape[1]
        matchers = [self._bound[row].matcher for row in rows]
        self._batch.fill(matchers, self._flat_masks, [row * num_places for row in rows])
        for row in rows:
            if self._bound[row].matcher.inner.is_error():
                self._begin_anew(self._bound[row], self._masks[row, 0])
            self._finish(row, 0, self._bound[row].matcher)

    def _begin_anew(self, bound: _Bound, mask: NDArray[np.int32]) -> None:
        """What other rows have found out of the grammar may be what was too much. If not, it fails again.

        Rows of a grammar fail in the same step, and share what the first of them has built. One that is too much beside
        the others has its own.
        """
        began, text = time.monotonic(), bound.matcher.text
        bound.matcher.build.is_spent = True
        other = self._store.unspent(bound.grammar_id)
        if other is not None and bound.goes_on_with(other, mask):
            return
        if self._building_s <= _MOST_BUILDING_S:
            bound.goes_on_with(self._store.anew(bound.grammar_id, text, keep=other is None), mask)
            self._building_s += time.monotonic() - began

    def _look_ahead(self, rows: list[int], trees: list[tuple[list[int], list[int]]]) -> None:
        """Masks behind each draft, as far as the drafts are allowed: what follows a wrong one will never count.

        `trees`: of each row, its drafts and which draft each of them follows (`Drafts.follows`).
        """
        for row, (tokens, follows) in zip(rows, trees, strict=True):
            matchers: list[Matcher | None] = [self._bound[row].matcher]
            for draft, (token, parent) in enumerate(zip(tokens, follows, strict=True)):
                shared = parent < 0 or parent in follows[draft + 1 :]
                matchers.append(self._follow(row, matchers[parent + 1], parent + 1, token, shared))
                if (matcher := matchers[-1]) is not None:
                    matcher.fill(self._masks[row, draft + 1])
                    self._finish(row, draft + 1, matcher)
                else:
                    self._masks[row, draft + 1] = -1
                    self._failed[row, draft + 1] = False

    def _follow(self, row: int, matcher: Matcher | None, place: int, token: int, shared: bool) -> Matcher | None:
        """The matcher of a place, one token further; a copy, if it is `shared`. None where the token is not allowed."""
        if matcher is None or self._failed[row, place] or not is_allowed(self._masks[row, place], token):
            return None
        further = matcher.copy() if shared else matcher
        further.accept([token])
        return further

    def _finish(self, row: int, place: int, matcher: Matcher) -> None:
        """A mask has been filled: note whether it means anything, and see to ends that must wait."""
        bound, mask = self._bound[row], self._masks[row, place]
        self._failed[row, place] = matcher.inner.is_error()
        if self._failed[row, place]:
            mask[:] = -1
            return
        forbid(mask, bound.reluctant)
        if matcher.num_accepted < bound.min_tokens:
            forbid(mask, bound.early)


def is_allowed(mask: NDArray[np.int32], token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


def forbid(mask: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
    """Take tokens out of a mask [num_mask_words], unless nothing would be left."""
    if not len(tokens):
        return
    before = mask.copy()
    np.bitwise_and.at(mask.view(np.uint32), tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))
    if not mask.any():
        mask[:] = before
