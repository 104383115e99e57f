"""The scheduler against a device that remembers: whatever happens, the tokens are those of the prompt alone."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipring.scheduler import scheduler as policy
from slipring.scheduler.block_pool import BlockPool
from slipring.scheduler.config import SchedulerConfig
from slipring.scheduler.offload.port import NullOffload, OffloadPort
from slipring.scheduler.request import FinishReason, Request, RequestStatus
from slipring.scheduler.scheduler import Scheduler
from slipring.scheduler.step import ProtocolError
from slipring.shm.params import MAX_STOP_TOKEN_IDS, SamplingParams
from slipring.shm.table import BatchTable, TableShape
from slipring.shm.wire import NO_MATCH, NO_TOKEN, NON_FINITE, StepInputView, StepOutputView, StepShape, score_words
from tests.simulated_device import SimulatedDevice, expected_embedding, expected_scores, expected_tokens

VOCAB = 7  # small, so that prefixes collide and stop tokens come up


class Harness:
    """Scheduler, batch table and device in one process, with `depth` steps in flight."""

    def __init__(self, depth: int = 2, **overrides: object) -> None:
        settings = {
            "num_blocks": 24,
            "block_size": 4,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 16,
            "num_rows": 9,
            "max_model_len": 64,
        } | overrides
        self.config = SchedulerConfig(**settings)  # type: ignore[arg-type]
        shape = TableShape(self.config.num_rows, self.config.max_model_len, self.config.block_size)
        self.table = BatchTable.create(shape)
        self.scheduler = Scheduler(self.config, self.table, VOCAB, self.make_offload)
        self.device = SimulatedDevice(self.table, self.config.num_blocks, VOCAB)
        step_shape = StepShape.of(self.config.max_num_seqs, self.config.max_draft, self.config.block_size)
        payloads = [
            [memoryview(bytearray(size)) for _ in range(depth + 2)]
            for size in (step_shape.input_bytes, step_shape.output_bytes)
        ]
        self.inputs = [StepInputView(payload, step_shape) for payload in payloads[0]]
        self.outputs = [StepOutputView(payload, step_shape) for payload in payloads[1]]
        self.depth = depth
        self.unrun: deque[int] = deque()
        self.ran: deque[int] = deque()
        self.output_of: dict[Request, list[int]] = {}
        self.reason_of: dict[Request, FinishReason] = {}
        self.report_of: dict[Request, list[int]] = {}
        self.clock = 0.0

    def make_offload(self, pool: BlockPool) -> OffloadPort:
        return NullOffload(pool)

    def add(self, prompt: list[int], max_tokens: int = 8, seed: int = 1, **kwargs: object) -> Request:
        stop = kwargs.pop("stop", ())
        more = {name: kwargs.pop(name) for name in ("prompt_logprobs", "embedding_size") if name in kwargs}
        params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=stop, **more)  # type: ignore[arg-type]
        self.clock += 1
        request = Request(np.array(prompt, np.int32), params, arrival=self.clock, **kwargs)  # type: ignore[arg-type]
        request.hash_prompt(self.config.block_size)
        self.output_of[request] = []
        self.report_of[request] = []
        self.scheduler.add(request)
        return request

    def publish(self) -> bool:
        """Schedule one more step if the pipeline has room."""
        if self.scheduler.num_in_flight >= self.depth:
            return False
        step = self.scheduler.schedule(self.inputs[self.scheduler._next_step_id % len(self.inputs)])
        if step is None:
            return False
        assert step.num_rows <= self.config.max_num_seqs
        assert step.view.header[StepInputView.NUM_TOKENS] <= self.config.max_num_batched_tokens
        self.unrun.append(step.step_id)
        return True

    def run_device(self) -> bool:
        if not self.unrun:
            return False
        step_id = self.unrun.popleft()
        self.device.run(self.inputs[step_id % len(self.inputs)], self.outputs[step_id % len(self.outputs)])
        self.ran.append(step_id)
        return True

    def take_output(self, settle: bool = True) -> bool:
        if not self.ran:
            return False
        step_id = self.ran.popleft()
        view = self.outputs[step_id % len(self.outputs)]
        returned = self.scheduler.update(view, step_id)
        for report in returned.reports:
            self.report_of[report.request] += report.words(view).tolist()
            if report.ended is not None:
                self.reason_of[report.request] = report.ended
        for request, token in zip(returned.requests, returned.tokens, strict=True):
            self.output_of[request].append(token)
        for index, (reason, _) in returned.finished.items():
            self.reason_of[returned.requests[index]] = reason
        if settle:
            self.scheduler.settle()
        return True

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not (self.publish() | self.run_device() | self.take_output()):
                assert not self.scheduler.has_work, "work is left and nothing moves"
                return
            self.scheduler.check_integrity()
        raise AssertionError("does not come to an end")

    def assert_right(self, request: Request) -> None:
        params = request.params
        prompt = request.token_ids[: request.num_prompt].tolist()
        want = expected_tokens(prompt, params.seed, VOCAB, params.max_tokens, params.stop_token_ids)
        assert self.output_of[request] == want
        stopped = bool(want) and want[-1] in params.stop_token_ids
        assert self.reason_of[request] is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        self.assert_reported(params, prompt, np.array(self.report_of[request], np.int32))

    def assert_reported(self, params: SamplingParams, prompt: list[int], words: np.ndarray) -> None:
        """Every prompt token but the first once, in order; or the whole hidden state."""
        if params.embedding_size:
            assert words.view(np.float32).tolist() == expected_embedding(prompt, params.embedding_size)
        elif params.prompt_logprobs < 0:
            assert len(words) == 0
        else:
            records = words.reshape(-1, score_words(params.prompt_logprobs))
            assert records[:, 1].tolist() == list(range(1, len(prompt)))
            expected = expected_scores(prompt, VOCAB)
            assert records[:, 0].copy().view(np.float32).tolist() == [logprob for logprob, _ in expected]
            if params.prompt_logprobs:
                assert records[:, 2].tolist() == [first for _, first in expected]

    def assert_idle(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.num_running == 0 and self.scheduler.num_waiting == 0
        assert self.scheduler.pool.num_free == self.config.num_blocks
        assert self.scheduler.rows.num_free == self.config.num_rows


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_tokens_are_those_of_the_prompt_alone(depth: int, caching: bool) -> None:
    harness = Harness(depth, enable_prefix_caching=caching)
    prompts = [[1, 2, 3], [1, 2, 3, 4, 5, 6, 0, 1, 2], list(range(5)) * 6, [4], [1, 2, 3, 4, 5, 6, 0, 1, 3]]
    requests = [harness.add(prompt, max_tokens=5 + i, seed=i) for i, prompt in enumerate(prompts)]
    harness.run()
    for request in requests:
        harness.assert_right(request)
    harness.assert_idle()


def test_a_place_in_the_batch_is_counted_once() -> None:
    """Where a request's last step is not back, the next one has its place already, and both hold a row."""
    harness = Harness(2, max_num_seqs=2, num_rows=4)
    requests = [harness.add([1, 2, i], max_tokens=1 if i == 0 else 6, seed=i) for i in range(3)]
    assert harness.publish() and harness.publish()
    scheduler = harness.scheduler
    assert (scheduler.num_admitted, scheduler.num_running, scheduler.num_waiting) == (3, 2, 0)
    harness.run()
    for request in requests:
        harness.assert_right(request)
    harness.assert_idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_small_pool_preempts_and_changes_nothing(depth: int, policy: str) -> None:
    harness = Harness(depth, num_blocks=10, max_model_len=40, policy=policy)
    requests = [harness.add([i, 1, 2, 3], max_tokens=30, seed=i, priority=i % 2) for i in range(5)]
    harness.run()
    assert harness.scheduler.counters.num_preemptions > 0
    for request in requests:
        harness.assert_right(request)
    harness.assert_idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("max_draft", [1, 3, 7])
def test_drafts_change_no_token_and_save_steps(depth: int, block_size: int, max_draft: int) -> None:
    harness = Harness(depth, max_draft=max_draft, block_size=block_size, num_blocks=400, max_num_batched_tokens=64)
    stops = [(), (3,), (), (1, 2)]
    requests = [harness.add([i, 1, 2], max_tokens=40, seed=i, stop=stops[i]) for i in range(4)]
    harness.run()
    for request in requests:
        harness.assert_right(request)
    assert harness.device.num_accepted_drafts > 10
    assert harness.scheduler.counters.num_steps < 40
    counters = harness.scheduler.counters
    assert counters.num_draft_tokens >= sum(counters.num_accepted_per_position) > 0
    harness.assert_idle()


def test_drafts_never_preempt() -> None:
    """Where blocks are short, rows go on without drafts before anybody loses its blocks for them."""
    harness = Harness(2, max_draft=5, block_size=1, num_blocks=34, max_model_len=34, max_num_seqs=2)
    requests = [harness.add([i], max_tokens=16, seed=i) for i in range(2)]
    harness.run()
    assert harness.scheduler.counters.num_preemptions == 0
    for request in requests:
        harness.assert_right(request)


def test_a_repeated_prompt_hits_whole_blocks_strictly_below_its_end() -> None:
    harness = Harness()
    first = harness.add([1, 2, 3, 4, 5, 6, 0, 1], max_tokens=6)
    harness.run()
    again = harness.add([1, 2, 3, 4, 5, 6, 0, 1], max_tokens=6)
    harness.run()
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 4)
    turn = harness.add([1, 2, 3, 4, 5, 6, 0, 1, *harness.output_of[first], 3], max_tokens=3)
    harness.run()
    assert turn.num_cached_tokens == 12, "the answer's own blocks are reused on the next turn"
    for request in (first, again, turn):
        harness.assert_right(request)


def test_a_pool_that_is_rebuilt_again_and_again_gives_each_prompt_its_own_tokens() -> None:
    """Prompts come back in any order while their blocks are evicted and reused; some are aborted on the way."""
    chance = random.Random(3)
    harness = Harness(num_blocks=12, max_model_len=40)
    prompts = [[chance.randrange(2) for _ in range(chance.randrange(4, 24))] for _ in range(20)]
    for _ in range(4):
        chance.shuffle(prompts)
        requests = [harness.add(prompt, max_tokens=6, seed=3) for prompt in prompts]
        for request in chance.sample(requests, 3):
            harness.publish(), harness.run_device(), harness.take_output()
            if harness.scheduler.abort(request):
                requests.remove(request)
        harness.run()
        for request in requests:
            harness.assert_right(request)
    assert harness.scheduler.counters.prefix_hits > 0
    harness.assert_idle()


def test_a_preempted_request_is_no_hit_of_its_own_and_hits_add_up() -> None:
    harness = Harness(num_blocks=10, max_model_len=40)
    distinct = [harness.add([i, 1, 2, 3, i, 5, 6], max_tokens=30, seed=i) for i in range(5)]
    harness.run()
    counters = harness.scheduler.counters
    assert counters.num_preemptions > 0 and counters.prefix_hits == 0
    assert counters.prefix_queries == 7 * len(distinct) and not any(request.num_cached_tokens for request in distinct)
    roomy = Harness(num_blocks=64)
    roomy.add([1] * 17)
    roomy.run()
    batch = [roomy.add([1] * length) for length in (3, 9, 17)]
    roomy.run()
    assert [request.num_cached_tokens for request in batch] == [0, 8, 16]
    assert roomy.scheduler.counters.prefix_hits == 24


def test_salts_do_not_share() -> None:
    harness = Harness()
    for salt, hits in (("a", 0), ("a", 4), ("b", 0), (None, 0), ("", 0)):
        request = harness.add([1, 2, 3, 4, 5], cache_salt=salt)
        harness.run()
        assert request.num_cached_tokens == hits
        harness.assert_right(request)


def test_siblings_wait_for_the_leaders_blocks() -> None:
    harness = Harness(max_num_batched_tokens=8)
    prompt = [1, 2, 3, 4] * 5
    leader = harness.add(prompt, seed=1)
    siblings = [harness.add(prompt, seed=seed, leader=leader) for seed in (2, 3)]
    harness.run()
    assert [sibling.num_cached_tokens for sibling in siblings] == [16, 16]
    for request in (leader, *siblings):
        harness.assert_right(request)


def test_an_aborted_leader_sets_its_siblings_free() -> None:
    harness = Harness()
    leader = harness.add([1, 2, 3, 4] * 5, seed=1)
    sibling = harness.add([1, 2, 3, 4] * 5, seed=2, leader=leader)
    harness.publish()
    harness.scheduler.abort(leader)
    harness.run()
    harness.assert_right(sibling)
    harness.assert_idle()


def test_an_aborted_request_is_free_at_once_and_its_late_tokens_are_dropped() -> None:
    harness = Harness(depth=2)
    request = harness.add([1, 2, 3], max_tokens=30)
    for _ in range(4):
        harness.publish(), harness.run_device(), harness.take_output()
    harness.publish()
    seen = len(harness.output_of[request])
    assert harness.scheduler.abort(request) and not harness.scheduler.abort(request)
    assert harness.scheduler.pool.num_free == harness.config.num_blocks
    harness.run()
    assert len(harness.output_of[request]) == seen
    harness.assert_idle()


def test_a_request_belongs_to_one_scheduler_at_a_time() -> None:
    old, new = Harness(), Harness()
    request = old.add([1, 2, 3])
    old.publish()
    with pytest.raises(AssertionError, match="one scheduler at a time"):
        new.scheduler.add(request)
    assert not old.scheduler.is_bereft
    request.restart(request.token_ids, 0, old.config.block_size)
    new.output_of[request], new.report_of[request] = [], []
    new.scheduler.add(request)
    assert old.scheduler.is_bereft and not new.scheduler.is_bereft
    new.run()
    new.assert_right(request)


def test_a_prompt_of_one_token_and_one_token_out() -> None:
    harness = Harness()
    request = harness.add([3], max_tokens=1)
    harness.run()
    harness.assert_right(request)
    assert harness.scheduler.counters.num_steps == 1, "nothing is ever scheduled past max_tokens"


def test_nothing_is_scheduled_past_max_tokens() -> None:
    harness = Harness(depth=3)
    harness.add([1, 2, 3, 4, 5], max_tokens=9)
    harness.run()
    assert harness.scheduler.counters.num_steps == 9


def test_decode_rows_never_wait_for_a_long_prompt() -> None:
    harness = Harness(max_num_batched_tokens=8)
    short = harness.add([1], max_tokens=12)
    harness.publish(), harness.run_device(), harness.take_output()
    harness.add([2] * 40, max_tokens=2)
    while short.status is not RequestStatus.FINISHED:
        before = len(harness.output_of[short])
        harness.publish(), harness.run_device(), harness.take_output()
        assert len(harness.output_of[short]) == before + 1
    harness.run()


def test_priority_goes_first_and_ageing_lets_nobody_starve() -> None:
    harness = Harness(max_num_seqs=1, num_rows=2, policy="priority", priority_age_s=10.0, depth=1)
    low = harness.add([1], max_tokens=1, priority=5)
    high = harness.add([2], max_tokens=1, priority=0)
    harness.publish()
    assert high.status is RequestStatus.RUNNING and low.status is RequestStatus.WAITING
    harness.clock += 60
    late = harness.add([3], max_tokens=1, priority=0)
    harness.run_device(), harness.take_output(), harness.publish()
    assert low.status is RequestStatus.RUNNING and late.status is RequestStatus.WAITING
    harness.run()


@pytest.mark.parametrize("max_draft", [0, 3])
@pytest.mark.parametrize("failure", [NON_FINITE, NO_MATCH, NO_TOKEN])
def test_a_row_that_drew_nothing_ends_alone(failure: int, max_draft: int) -> None:
    harness = Harness(depth=1, max_draft=max_draft)
    bad = harness.add([1, 2, 3, 4, 5] * 5)
    good = harness.add([4, 5, 6])
    harness.publish(), harness.run_device(), harness.take_output()
    assert harness.scheduler.pool.match(bad.block_hashes), "its first chunk was indexed"
    harness.publish(), harness.run_device()
    harness.outputs[1].num_accepted[0] = failure
    harness.take_output()
    assert harness.reason_of[bad] is FinishReason.ERROR
    assert len(harness.output_of[bad]) == 1, "whatever its code, the failure stands for one token"
    assert harness.scheduler.pool.match(bad.block_hashes) == [], "what it computed is not trusted"
    harness.run()
    harness.assert_right(good)
    harness.assert_idle()


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_two_steps_may_come_back_before_the_next_goes_out(block_size: int) -> None:
    """`settle` runs after each of them: it must not give a row a second block that no step has carried yet."""
    harness = Harness(depth=2, num_blocks=400, block_size=block_size)
    requests = [harness.add([number + 1], max_tokens=40, seed=number) for number in range(6)]
    while harness.scheduler.has_work or harness.scheduler.num_in_flight:
        harness.publish(), harness.publish()
        harness.run_device(), harness.run_device()
        harness.take_output(), harness.take_output()
        harness.scheduler.check_integrity()
    for request in requests:
        harness.assert_right(request)


def test_a_block_meant_for_an_ended_admission_does_not_reach_the_rows_next_one() -> None:
    harness = Harness(depth=1, block_size=16, max_num_seqs=2, num_rows=2, max_num_batched_tokens=64)
    gone = harness.add([1] * 24, max_tokens=40)
    harness.publish()
    while not harness.scheduler._pending.count:
        harness.run_device(), harness.take_output(settle=False), harness.publish(), harness.scheduler.settle()
    harness.scheduler.abort(gone)
    request = harness.add([2] * 58, max_tokens=6)
    harness.run()
    harness.assert_right(request)


def test_aborting_a_request_that_never_got_in_line() -> None:
    harness = Harness()
    request = Request(np.array([1, 2], np.int32), SamplingParams(max_tokens=1))
    assert harness.scheduler.abort(request) and request.status is RequestStatus.FINISHED
    assert harness.scheduler.num_waiting == 0 and harness.scheduler.waiting.num_tokens == 0


def test_parameters_that_do_not_fit_are_refused_and_nothing_is_taken() -> None:
    harness = Harness()
    harness.add([1, 2], stop=tuple(range(MAX_STOP_TOKEN_IDS + 1)))
    with pytest.raises(ValueError, match="room for"):
        harness.publish()
    assert harness.scheduler.pool.num_free == harness.config.num_blocks
    assert harness.scheduler.num_waiting == 1
    harness.scheduler.rows.check_integrity([])


def test_output_of_another_step_is_a_protocol_error() -> None:
    harness = Harness()
    harness.add([1, 2])
    harness.publish(), harness.run_device()
    with pytest.raises(ProtocolError):
        harness.scheduler.update(harness.outputs[0], 1)
    harness.outputs[0].rows[0] += 1
    with pytest.raises(ProtocolError):
        harness.scheduler.update(harness.outputs[0], 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_reports_are_cut_by_the_outputs_room(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step never exceeds its slots: 24 words hold four records of six, or three hidden states of eight."""
    monkeypatch.setattr(policy, "REPORT_WORDS", 24)
    harness = Harness(depth)
    harness.device.embedding_size = 8
    scored = [harness.add([i] * 19, max_tokens=i, seed=i, prompt_logprobs=2) for i in range(4)]
    embedded = [harness.add([5, i] * 3, max_tokens=0, embedding_size=8) for i in range(5)]
    plain = harness.add([6] * 20)
    while harness.scheduler.has_work or harness.scheduler.num_in_flight:
        harness.publish(), harness.run_device()
        assert all(view.header[view.NUM_REPORTED] <= 24 for view in harness.outputs)
        harness.take_output()
    for request in (*scored, *embedded, plain):
        harness.assert_right(request)
    harness.assert_idle()


def test_a_scored_prompt_reads_no_cache_but_fills_it() -> None:
    harness = Harness()
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2]
    for more, hits in (({}, 0), ({"prompt_logprobs": 1}, 0), ({"max_tokens": 0, "prompt_logprobs": 1}, 0), ({}, 8)):
        request = harness.add(prompt, **more)  # type: ignore[arg-type]
        harness.run()
        assert request.num_cached_tokens == hits
        harness.assert_right(request)
    harness = Harness()
    harness.add(prompt, prompt_logprobs=1)
    harness.run()
    request = harness.add(prompt, max_tokens=0, embedding_size=4)
    harness.run()
    assert request.num_cached_tokens == 8, "a hidden state at the end needs the last position alone"
    harness.assert_right(request)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_prompt_reports_every_token_once(depth: int, caching: bool) -> None:
    harness = Harness(depth, num_blocks=12, max_model_len=44, max_num_batched_tokens=7, enable_prefix_caching=caching)
    running = [harness.add([i, 1, 2, 3], max_tokens=24, seed=i) for i in range(2)]
    scored = [harness.add([3, 1, 4, i] * 4, max_tokens=12, seed=i, prompt_logprobs=1) for i in range(4)]
    harness.run()
    assert any(request.num_preemptions for request in scored)
    for request in (*running, *scored):
        harness.assert_right(request)
    harness.assert_idle()


def test_a_request_without_tokens_may_fill_the_context() -> None:
    harness = Harness(max_model_len=16)
    request = harness.add([1, 2, 3, 4] * 4, max_tokens=0, prompt_logprobs=0)
    harness.run()
    harness.assert_right(request)
    assert harness.scheduler.counters.num_steps == 1
    harness.assert_idle()


def test_a_report_that_is_not_finite_ends_its_request_alone() -> None:
    harness = Harness(depth=1)
    bad = harness.add([1, 2, 3, 4, 5] * 2, max_tokens=0, embedding_size=4)
    good = harness.add([4, 5, 6], max_tokens=0, embedding_size=4)
    harness.publish(), harness.run_device()
    harness.outputs[0].num_accepted[0] = -1
    harness.take_output()
    assert harness.reason_of[bad] is FinishReason.ERROR
    assert harness.scheduler.pool.match(bad.block_hashes) == [], "what it computed is not trusted"
    harness.assert_right(good)
    harness.assert_idle()


_KINDS: list[dict[str, int]] = [{}, {"prompt_logprobs": 2}, {"max_tokens": 0, "embedding_size": 4},
                                {"max_tokens": 0, "prompt_logprobs": 0}]  # fmt: skip
operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(1, 30),
            st.integers(1, 20),
            st.integers(0, 3),
            st.integers(0, 2),
            st.sampled_from(_KINDS),
        ),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("publish")),
        st.tuples(st.just("device")),
        st.tuples(st.just("output"), st.booleans()),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    operations=operations,
    depth=st.integers(1, 3),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    num_blocks=st.integers(13, 24),
    num_rows=st.integers(6, 9),
    max_draft=st.sampled_from([0, 0, 1, 2, 5]),
)
def test_any_order_of_events(operations, depth, caching, policy, num_blocks, num_rows, max_draft) -> None:
    harness = Harness(
        depth,
        max_draft=max_draft,
        enable_prefix_caching=caching,
        policy=policy,
        num_blocks=num_blocks,
        num_rows=num_rows,
        max_model_len=52,
    )
    requests: list[Request] = []
    aborted: set[Request] = set()
    for operation in operations:
        match operation:
            case ("add", length, max_tokens, kind, priority, more):
                prompt = [(kind * (i // 9 + 1)) % VOCAB for i in range(length)]
                leader = requests[-1] if requests and kind == 3 and length % 2 else None
                if leader is not None:
                    prompt = leader.token_ids[: leader.num_prompt].tolist()
                stop = (2,) if kind == 1 else ()
                more = {"max_tokens": max_tokens, "seed": kind} | more
                requests.append(harness.add(prompt, stop=stop, priority=priority, leader=leader, **more))
            case ("abort", index) if requests:
                request = requests[index % len(requests)]
                if harness.scheduler.abort(request):
                    aborted.add(request)
            case ("publish",):
                harness.publish()
            case ("device",):
                harness.run_device()
            case ("output", settle):
                harness.take_output(settle)
        harness.scheduler.check_integrity()
    harness.run()
    for request in requests:
        if request not in aborted:
            harness.assert_right(request)
    harness.assert_idle()


def test_a_leader_that_is_not_in_line_is_not_waited_for() -> None:
    harness = Harness()
    leader = Request(np.array([1, 2, 3, 4, 5, 6], np.int32), SamplingParams(max_tokens=4))
    follower = harness.add([1, 2, 3, 4, 5, 6], leader=leader)
    harness.run()
    harness.assert_right(follower)
