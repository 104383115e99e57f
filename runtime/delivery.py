"""A returned step's tokens and reports on their way to the completions, whose sinks write to clients."""

from __future__ import annotations

from slipring.runtime.completion import Completion
from slipring.runtime.request import TokenLogprob
from slipring.scheduler.request import FinishReason, Request
from slipring.scheduler.scheduler import Scheduler
from slipring.scheduler.step import Returned
from slipring.shm.wire import StepOutputView


def deliver(scheduler: Scheduler, returned: Returned, view: StepOutputView, now: float) -> list[Request]:
    """Hand out what the step brought; returns the requests that have ended with it. `view`: the step's slot."""
    ended = [returned.requests[index] for index in returned.finished]
    completion: Completion | None
    for report in returned.reports:
        if report.ended is not None:
            ended.append(report.request)
        if (completion := report.request.owner) is not None:
            completion.take_report(report.words(view), report.ended, now)
    ends, drawn = returned.finished, zip(returned.requests, returned.tokens, returned.places, strict=True)
    for index, (request, token, place) in enumerate(drawn):
        completion = request.owner
        if completion is None or completion.finished:
            continue  # a sink of this very step has aborted it, or a stop string in it has ended it
        reason, stop_token = ends.get(index, (None, None)) if ends else (None, None)
        if reason is FinishReason.ERROR:
            completion.fail(view.failure(place), now)
            continue
        logprobs = (_logprob(view, place, token, request),) if completion.wants_logprobs else None
        if completion.push(token, logprobs, reason, stop_token, now):
            scheduler.abort(request)
            ended.append(request)
    return ended


def _logprob(view: StepOutputView, place: int, token: int, request: Request) -> TokenLogprob:
    count = request.params.logprobs
    ids, values = view.top_ids[place, :count].tolist(), view.top_logprobs[place, :count].tolist()
    top = tuple(zip(ids, values, strict=True))
    return TokenLogprob(token, float(view.logprob[place]), int(view.rank[place]), top)
