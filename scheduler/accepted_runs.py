"""What a returned step means under speculation: an entry has drawn a run of tokens, accepted drafts and one more.

A run ends where the request ends, at its first stop token or at its limit: what was drawn beyond is dropped. What of
a step's drafts was rejected is taken back from the decode columns, whose positions are upper bounds until then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipring.scheduler.decode_rows import DecodeRows
from slipring.scheduler.live_rows import Int32Array, LiveRows
from slipring.scheduler.request import Request
from slipring.scheduler.step import Counters, Returned, Step
from slipring.shm.wire import StepOutputView


class AcceptedRuns:
    def __init__(self, live: LiveRows, decode: DecodeRows, counters: Counters, max_draft: int, depth: int) -> None:
        """`max_draft`: drafts of a row in one step; `depth`: most of them that are expected to be accepted."""
        self._live = live
        self._decode = decode
        self._counters = counters
        self._width = 1 + max_draft
        counters.count_to(depth)

    def take(
        self, step: Step, view: StepOutputView, entries: NDArray[np.intp] | slice, rows: Int32Array
    ) -> tuple[Returned, list[tuple[int, bool]]]:
        """Enter what these live entries drew; returns it, and which tokens may end a request: (index, failed)."""
        num, live = step.num_rows, self._live
        numbers = np.arange(num)[entries]
        accepted = view.num_accepted[:num][entries]
        failed = accepted < 0
        self._take_back(step, view, numbers, rows, accepted)
        counts = np.minimum(np.where(failed, 1, accepted), np.maximum(live.limit[rows] - live.num_tokens[rows], 0))
        place = np.arange(self._width)
        drawn = np.where(place < counts[:, None], view.tokens[:num][entries], 0)
        requests: list[Request] = [live.request_of[row] for row in rows.tolist()]  # type: ignore[misc]
        self._cut_at_stops(requests, drawn, counts)
        live.append_runs(rows, drawn, counts)
        self._advance(step, numbers, rows)
        inside = place < counts[:, None]
        owner = np.repeat(np.arange(len(rows)), counts)
        places = (numbers[:, None] * self._width + place)[inside]
        returned = Returned(step, [requests[i] for i in owner.tolist()], drawn[inside].tolist(), places.tolist())
        return returned, self._ends(rows, counts, drawn, failed)

    def _take_back(
        self, step: Step, view: StepOutputView, numbers: NDArray[np.intp], rows: Int32Array, accepted: Int32Array
    ) -> None:
        decode = numbers < step.num_decode
        numbers, accepted = numbers[decode], np.maximum(accepted[decode] - 1, 0)
        self._decode.take_back(rows[decode], step.view.num_draft[numbers], accepted)
        verified = view.num_draft[numbers]
        counters = self._counters
        counters.num_drafts += int((verified > 0).sum())
        counters.num_draft_tokens += int(verified.sum())
        deepest = int(accepted.max(initial=0))
        counters.count_to(deepest)
        for position in range(deepest):
            counters.num_accepted_per_position[position] += int((accepted > position).sum())

    def _cut_at_stops(self, requests: list[Request], drawn: Int32Array, counts: Int32Array) -> None:
        """Shorten the runs that hold a stop token of their own request, in place, so that they end with it."""
        place = np.arange(self._width)
        suspects: NDArray[np.bool_] = (self._live.stop_uses[drawn] > 0) & (place < counts[:, None])
        for index in np.flatnonzero(suspects.any(1)).tolist():
            stop_token_ids = requests[index].stop_token_ids
            for at in np.flatnonzero(suspects[index]).tolist():
                if int(drawn[index, at]) in stop_token_ids:
                    counts[index] = at + 1
                    break

    def _advance(self, step: Step, numbers: NDArray[np.intp], rows: Int32Array) -> None:
        """A decode row has been computed up to its last token; a chunk as far as it was asked for."""
        view, is_chunk = step.view, numbers >= step.num_decode
        computed = self._live.num_tokens[rows] - 1
        chunks = numbers[is_chunk]
        computed[is_chunk] = view.start[chunks] + view.num_tokens[chunks]
        self._live.advance_computed(rows, computed)

    def _ends(
        self, rows: Int32Array, counts: Int32Array, drawn: Int32Array, failed: NDArray[np.bool_]
    ) -> list[tuple[int, bool]]:
        live, ends = self._live, np.cumsum(counts) - 1
        last = drawn[np.arange(len(rows)), np.maximum(counts - 1, 0)]
        may = (live.num_tokens[rows] >= live.limit[rows]) | (live.stop_uses[last] > 0) | failed
        at = (may & (counts > 0)).nonzero()[0]
        return [(int(ends[i]), bool(failed[i])) for i in at.tolist()]
