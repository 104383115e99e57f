"""The engine over real rings and a real process whose worker is scripted: submit, abort, faults, limits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from slipring.runtime.config import ConfigError, EngineConfig
from slipring.runtime.engine import Engine, HealthState, StartupError
from slipring.runtime.epoch import Epoch
from slipring.runtime.request import (
    ContextLengthError,
    Delta,
    EngineDeadError,
    GenerationRequest,
    InvalidRequestError,
    QueueFullError,
)
from slipring.shm.params import SamplingParams
from slipring.shm.segment import Segment
from slipring.shm.wire import NO_TOKEN, NON_FINITE
from tests.simulated_device import expected_embedding, expected_scores, expected_tokens
from tests.waits import settled


@contextlib.asynccontextmanager
async def running(script: dict[str, object] | None = None, **settings: object) -> AsyncIterator[Engine]:
    os.environ["SCRIPT"] = json.dumps(script or {})
    defaults = {"num_gpu_blocks_override": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    engine = Engine(
        EngineConfig(
            model="smollm2",
            worker_module="tests.scripted_worker",
            debug_integrity=True,
            **(defaults | settings),  # type: ignore[arg-type]
        )
    )
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()
        os.environ.pop("SCRIPT")


class Collector:
    """A sink that keeps everything and knows when all n completions are done."""

    def __init__(self, n: int = 1) -> None:
        self.deltas: list[Delta] = []
        self._left = n
        self.done = asyncio.Event()

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self._left -= delta.finish_reason is not None
        if self._left == 0:
            self.done.set()

    def tokens(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    async def wait(self) -> Collector:
        await asyncio.wait_for(self.done.wait(), 60)
        return self


_PARAMS = ("prompt_logprobs", "embedding_size", "bad_words", "allowed_token_ids")


def ask(prompt: list[int], max_tokens: int = 8, seed: int = 1, **more: object) -> GenerationRequest:
    stop_ids = more.pop("stop_token_ids", ())
    reported = {name: more.pop(name) for name in _PARAMS if name in more}
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=stop_ids, **reported)  # type: ignore[arg-type]
    request_id = str(more.pop("request_id", f"r{time.monotonic_ns()}"))
    return GenerationRequest(request_id=request_id, prompt_token_ids=prompt, params=params, **more)  # type: ignore[arg-type]


def submit(engine: Engine, request: GenerationRequest) -> Collector:
    collector = Collector(request.n)
    engine.submit(request, collector)
    assert not collector.deltas, "pieces never come inside submit()"
    return collector


def run(coroutine) -> None:
    import uvloop

    uvloop.run(coroutine)


async def healthy(engine: Engine) -> None:
    deadline = time.monotonic() + 60
    while engine.health().state is not HealthState.HEALTHY:
        assert time.monotonic() < deadline, engine.health()
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_many_streams_get_their_own_tokens(async_scheduling: bool) -> None:
    async def scenario() -> None:
        async with running(async_scheduling=async_scheduling) as engine:
            prompts = [list(range(1, 2 + 7 * i)) for i in range(10)]
            streams = [submit(engine, ask(prompt, 5 + i, seed=i)) for i, prompt in enumerate(prompts)]
            for i, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
                await stream.wait()
                assert stream.tokens() == expected_tokens(prompt, i, engine.spec.vocab_size, 5 + i)
                assert stream.text() == engine.tokenizer.decode(stream.tokens())
                assert stream.deltas[-1].finish_reason == "length"
            await settled(engine)
            assert engine.stats().generation_tokens == sum(5 + i for i in range(10))

    run(scenario())


def test_n_completions_share_their_prompt() -> None:
    async def scenario() -> None:
        async with running() as engine:
            stream = await submit(engine, ask(list(range(40)), n=3)).wait()
            want = expected_tokens(list(range(40)), 1, engine.spec.vocab_size, 8)
            assert [stream.tokens(i) for i in range(3)] == [want] * 3
            finals = {d.index: d.num_cached_tokens for d in stream.deltas if d.finish_reason}
            assert finals == {0: 0, 1: 32, 2: 32}

    run(scenario())


def test_stop_token_and_stop_string_end_a_stream_and_free_it() -> None:
    async def scenario() -> None:
        async with running() as engine:
            prompt = [5, 6, 7]
            tokens = expected_tokens(prompt, 1, engine.spec.vocab_size, 30)
            by_id = await submit(engine, ask(prompt, 30, stop_token_ids=(tokens[4],))).wait()
            assert by_id.tokens() == tokens[:5] and by_id.deltas[-1].stop_reason == tokens[4]
            assert by_id.text() == engine.tokenizer.decode(tokens[:4]), "the stop token's own text is left out"
            text = engine.tokenizer.decode(tokens)
            stop = text[12:15]
            by_text = await submit(engine, ask(prompt, 30, stop=(stop,))).wait()
            assert by_text.text() == text[: text.index(stop)] and by_text.deltas[-1].stop_reason == stop
            assert by_text.deltas[-1].finish_reason == "stop"
            await settled(engine)

    run(scenario())


def test_what_was_held_back_is_told_when_a_request_is_ended() -> None:
    async def scenario() -> None:
        async with running({"step_s": 0.01}) as engine:
            prompt = [5, 6, 7]
            tokens = expected_tokens(prompt, 1, engine.spec.vocab_size, 64)
            text = engine.tokenizer.decode(tokens)
            stop = text[1:] + "ZZZ"  # everything but the first character is held back, for it may become this
            request = ask(prompt, 64, stop=(stop,), request_id="held")
            stream = submit(engine, request)
            while len(stream.tokens()) < 3:
                await asyncio.sleep(0.001)
            assert stream.text() == text[:1] and engine.finish("held")
            await stream.wait()
            assert stream.deltas[-1].finish_reason == "abort"
            assert stream.text() == engine.tokenizer.decode(stream.tokens())
            await settled(engine)

    run(scenario())


def test_a_stop_string_in_the_middle_of_accepted_drafts() -> None:
    """Tokens behind it are as if they had never been drawn, and of two ends the first one counts."""
    speculation = '{"method": "ngram", "num_speculative_tokens": 5}'

    async def scenario() -> None:
        ends = []
        for settings in ({}, {"speculative_config": speculation}):
            async with running(**settings) as engine:
                prompt = [5, 6, 7]
                tokens = expected_tokens(prompt, 1, engine.spec.vocab_size, 12)
                found = []
                for place in range(12):
                    for max_tokens in (5, 12):
                        stop = engine.tokenizer.decode(tokens[place : place + 1])
                        stream = await submit(engine, ask(prompt, max_tokens, stop=(stop,))).wait()
                        last = stream.deltas[-1]
                        found.append((stream.text(), stream.tokens(), last.finish_reason, last.stop_reason))
                await settled(engine)
                assert (engine.stats().num_accepted_tokens > 0) == bool(settings)
                ends.append(found)
        assert ends[0] == ends[1] and {end[2] for end in ends[0]} == {"stop", "length"}

    run(scenario())


def test_abort_frees_everything_and_is_silent() -> None:
    async def scenario() -> None:
        async with running({"step_s": 0.002}) as engine:
            request = ask([1, 2, 3], 400)
            stream = submit(engine, request)
            while len(stream.deltas) < 3:
                await asyncio.sleep(0.001)
            steps = engine.stats().num_steps
            assert engine.abort(request.request_id) and not engine.abort(request.request_id)
            seen = len(stream.deltas)
            await settled(engine)
            assert engine.stats().num_steps <= steps + 2, "free within two steps"
            await asyncio.sleep(0.05)
            assert len(stream.deltas) == seen
            assert engine.stats().finished["abort"] == 1

    run(scenario())


def test_a_request_leaves_nothing_for_the_garbage_collector() -> None:
    """Cycles would pile up until a collection, which delays everybody's tokens."""

    async def scenario() -> None:
        async with running() as engine:
            await submit(engine, ask([1, 2, 3])).wait()
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                await submit(engine, ask([1, 2, 3], n=2)).wait()
                aborted = ask([4, 5], 400)
                submit(engine, aborted)
                await asyncio.sleep(0.05)
                engine.abort(aborted.request_id)
                await settled(engine)
                gc.collect()
                assert [item for item in gc.garbage if type(item).__module__.startswith("slipring")] == []
            finally:
                gc.set_debug(0)
                gc.garbage.clear()

    run(scenario())


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_block_size_serves(block_size: int) -> None:
    async def scenario() -> None:
        async with running(block_size=block_size, num_gpu_blocks_override=2048 // block_size) as engine:
            streams = [submit(engine, ask([i + 1], 60, seed=i)) for i in range(8)]
            for i, stream in enumerate(streams):
                await stream.wait()
                assert stream.tokens() == expected_tokens([i + 1], i, engine.spec.vocab_size, 60)
            await settled(engine)

    run(scenario())


LONG = {"max_model_len": 40_000, "allow_long_max_model_len": True, "num_gpu_blocks_override": 3000}


def test_a_long_prompt_may_be_aborted_while_it_is_hashed() -> None:
    async def scenario() -> None:
        async with running(**LONG) as engine:
            request = ask([1, 2, 3] * 10_000)
            stream = submit(engine, request)
            await asyncio.sleep(0)
            assert engine.abort(request.request_id)
            await settled(engine)
            await asyncio.wait_for(engine.drain(5), 2)
            assert not stream.deltas

    run(scenario())


def test_a_worker_that_dies_while_a_prompt_is_hashed_ends_nothing() -> None:
    async def scenario() -> None:
        async with running({"step_s": 0.001}, **LONG) as engine:
            short = submit(engine, ask([1], 60))
            long = submit(engine, ask([1, 2, 3] * 10_000, 3))
            os.kill(engine.worker_pids[0], signal.SIGKILL)
            for stream, prompt, count in ((short, [1], 60), (long, [1, 2, 3] * 10_000, 3)):
                await stream.wait()
                assert stream.tokens() == expected_tokens(prompt, 1, engine.spec.vocab_size, count)

    run(scenario())


def test_an_exception_outside_of_a_returned_step_is_a_fault_too() -> None:
    async def scenario() -> None:
        async with running(on_fault="abort") as engine:

            def broken(view: object) -> None:
                raise ZeroDivisionError("broken on purpose")

            scheduler = engine.replicas[0].scheduler
            assert scheduler is not None
            scheduler.schedule = broken  # type: ignore[method-assign, assignment]
            stream = await submit(engine, ask([1])).wait()
            assert stream.deltas[-1].finish_reason == "error" and "broken on purpose" in str(stream.deltas[-1].error)

    run(scenario())


def num_descriptors() -> int:
    """Open ones, once what is unreachable has gone (a mapping keeps a descriptor as long as arrays view it)."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_stopping_gives_everything_back_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cycle(script: dict[str, object], started: bool) -> None:
        monkeypatch.setenv("SCRIPT", json.dumps(script))
        engine = Engine(EngineConfig(model="smollm2", worker_module="tests.scripted_worker"))
        starting = asyncio.ensure_future(engine.start())
        if started:
            await starting
        else:
            await asyncio.sleep(0.2)
        await asyncio.wait_for(engine.stop(), 5)
        if not started:
            with pytest.raises(StartupError, match=r"stopped while it started|replica is clos"):
                await asyncio.wait_for(starting, 2)
        assert engine.health().state is not HealthState.HEALTHY
        with pytest.raises(EngineDeadError):
            engine.submit(ask([1]), Collector())
        assert len(asyncio.all_tasks()) == 1

    async def scenario() -> None:
        await cycle({}, started=True)
        before = num_descriptors()
        await cycle({}, started=True)
        await cycle({"never_ready": True}, started=False)
        assert num_descriptors() == before

    run(scenario())


def test_a_spawn_that_fails_is_a_start_up_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise BlockingIOError("no room for a process")

    async def fail() -> None:
        engine = Engine(EngineConfig(model="smollm2", worker_module="tests.scripted_worker"))
        with pytest.raises(StartupError, match="no room for a process"):
            await engine.start()
        await engine.stop()

    async def scenario() -> None:
        monkeypatch.setattr("subprocess.Popen", no_room)
        await fail()
        before = num_descriptors()
        await fail()
        assert num_descriptors() == before

    run(scenario())


def test_no_shared_memory_at_the_start_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anybody stops the engine: the tiers have memory and threads by then."""

    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def held() -> int:
        """Mappings of tiers, and threads of theirs."""
        gc.collect()
        threads = sum("fs" in thread.name for thread in threading.enumerate())
        return threads + Path("/proc/self/maps").read_text().count("kv-tier")

    files = {"type": "fs", "root_dir": str(tmp_path)}
    extra = {"cpu_bytes_to_use": 1 << 25, "secondary_tiers": [files]}
    config = EngineConfig(model="smollm2", kv_transfer_config=json.dumps({"kv_connector_extra_config": extra}))

    async def scenario() -> None:
        before = held()
        with pytest.raises(StartupError, match="--shm-size"):
            await Engine(config).start()
        deadline = time.monotonic() + 5
        while held() > before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    monkeypatch.setattr(Segment, "create", no_room)
    run(scenario())


def test_a_context_that_the_pool_cannot_hold() -> None:
    notes: list[str | None] = []

    async def cut() -> None:
        engine = Engine(EngineConfig(model="smollm2", worker_module="tests.scripted_worker", num_gpu_blocks_override=4))
        await engine.start(lambda event: notes.append(event.note))
        assert engine.max_model_len == 64
        with pytest.raises(ContextLengthError, match="at least"):
            engine.check_length("ocean " * 10_000)
        engine.check_length("ocean")
        await engine.stop()

    async def asked_for() -> None:
        async with running(num_gpu_blocks_override=4, max_model_len=65):
            pass

    run(cut())
    assert any(note and "from 8192 to 64" in note for note in notes)
    with pytest.raises(StartupError, match="--max-model-len 64 or less"):
        run(asked_for())


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 0}, "n"),
        ({"priority": 1 << 40}, "priority"),
        ({"stop": ("",)}, "stop"),
        ({"stop_token_ids": (10**9,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(65))}, "stop_token_ids"),
        ({"seed": -1}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0, "embedding_size": 5}, "model"),
        ({"max_tokens": 1, "embedding_size": 576}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((1,) * 2048,) * 2}, "bad_words"),
    ],
)
def test_parameters_are_checked_before_anything_starts(more: dict[str, object], param: str) -> None:
    async def scenario() -> None:
        async with running() as engine:
            with pytest.raises(InvalidRequestError) as caught:
                submit(engine, ask([1, 2], **more))  # type: ignore[arg-type]
            assert caught.value.param == param
            await asyncio.wait_for(engine.drain(1), 1)

    run(scenario())


@pytest.mark.parametrize("settings", [{}, {"num_gpu_blocks_override": 7}, {"async_scheduling": False}])
def test_prompt_logprobs_come_whole_with_the_first_piece(settings: dict[str, object]) -> None:
    """In chunks, beside others, preempted or not; once for each completion."""

    async def scenario() -> None:
        async with running(max_num_batched_tokens=8, max_num_seqs=4, **settings) as engine:
            prompts = [[i, *range(20 + 9 * i)] for i in range(4)]
            streams = [submit(engine, ask(prompt, 12, prompt_logprobs=2, n=1 + (i == 3)))
                       for i, prompt in enumerate(prompts)]  # fmt: skip
            for prompt, stream in zip(prompts, streams, strict=True):
                await stream.wait()
                firsts = {delta.index: delta for delta in reversed(stream.deltas)}
                carriers = [delta for delta in stream.deltas if delta.prompt_logprobs is not None]
                assert len(carriers) == len(firsts) and all(firsts[delta.index] is delta for delta in carriers)
                for delta in carriers:
                    assert delta.prompt_logprobs is not None
                    entries = delta.prompt_logprobs.entries(prompt, 1)
                    assert [entry.token_id for entry in entries] == prompt[1:]
                    found = [(entry.logprob, entry.top[0][0]) for entry in entries]
                    assert found == expected_scores(prompt, engine.spec.vocab_size)
                    assert [entry.rank for entry in entries] == list(range(1, len(prompt)))
                    assert stream.tokens(delta.index) == expected_tokens(prompt, 1, engine.spec.vocab_size, 12)
            assert (engine.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in settings)
            await settled(engine)

    run(scenario())


def test_a_prompt_alone_is_computed_and_reported() -> None:
    async def scenario() -> None:
        async with running(num_gpu_blocks_override=4) as engine:
            size = engine.spec.hidden_size
            prompt = list(range(64))
            scored = await submit(engine, ask(prompt, 0, prompt_logprobs=0)).wait()
            (delta,) = scored.deltas
            assert (delta.finish_reason, delta.token_ids, delta.text) == ("length", (), "")
            assert delta.prompt_logprobs is not None and len(delta.prompt_logprobs) == 63
            for cached in (0, 48):
                request = ask(prompt[::-1], 0, embedding_size=size)
                (delta,) = (await submit(engine, request).wait()).deltas
                assert delta.embedding is not None and delta.num_cached_tokens == cached
                assert delta.embedding.tolist() == expected_embedding(prompt[::-1], size)
            aborted = ask(prompt[5:], 0, embedding_size=size)
            submit(engine, aborted)
            engine.abort(aborted.request_id)
            (delta,) = (await submit(engine, ask([7], 0, prompt_logprobs=3)).wait()).deltas
            assert delta.prompt_logprobs is not None and len(delta.prompt_logprobs) == 0
            await settled(engine)

    run(scenario())


def test_what_cannot_be_served_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with running(max_queued_requests=2, max_num_seqs=1, max_num_batched_tokens=16) as engine:
            assert engine.max_model_len == 64 * 16, "the context ends where the pool does"
            for prompt, error, param in (
                ([], InvalidRequestError, "prompt"),
                ([-1], InvalidRequestError, "prompt"),
                ([engine.spec.vocab_size], InvalidRequestError, "prompt"),
                ([1] * 1024, ContextLengthError, "prompt"),
            ):
                with pytest.raises(error) as caught:
                    submit(engine, ask(prompt))
                assert caught.value.param == param
            streams = [submit(engine, ask([1, i], 50)) for i in range(2)]
            with pytest.raises(QueueFullError, match="--max-queued-requests"):
                submit(engine, ask([2], 50))
            assert engine.stats().num_rejected == 1
            for stream in streams:
                await stream.wait()
            await settled(engine)

    run(scenario())


def test_a_request_that_overruns_the_context_is_cut_to_it() -> None:
    async def scenario() -> None:
        async with running(num_gpu_blocks_override=4) as engine:
            stream = await submit(engine, ask([1] * 60, 1000)).wait()
            assert len(stream.tokens()) == 4 and stream.deltas[-1].finish_reason == "length"
            await settled(engine)

    run(scenario())


def test_preemption_changes_no_token() -> None:
    async def scenario() -> None:
        async with running(num_gpu_blocks_override=16, max_model_len=128) as engine:
            streams = [submit(engine, ask([i, 2, 3], 100, seed=i)) for i in range(6)]
            for i, stream in enumerate(streams):
                await stream.wait()
                assert stream.tokens() == expected_tokens([i, 2, 3], i, engine.spec.vocab_size, 100)
            assert engine.stats().num_preemptions > 0
            await settled(engine)

    run(scenario())


@pytest.mark.parametrize(
    ("script", "words"),
    [({"crash_at": 5}, "SIGKILL"), ({"raise_at": 5}, "scripted fault")],
    ids=["killed", "raised"],
)
def test_told_to_abort_a_dead_worker_ends_every_stream_at_once(script: dict[str, object], words: str) -> None:
    async def scenario() -> None:
        async with running(script, on_fault="abort") as engine:
            streams = [submit(engine, ask([i], 500)) for i in range(4)]
            for stream in streams:
                await stream.wait()
                assert stream.deltas[-1].finish_reason == "error" and words in str(stream.deltas[-1].error)
            assert engine.health().state is HealthState.UNHEALTHY
            with pytest.raises(EngineDeadError, match=words):
                submit(engine, ask([1]))
            await healthy(engine)
            await submit(engine, ask([1], 2)).wait()
            await settled(engine)

    run(scenario())


def test_a_worker_killed_from_outside_is_noticed_and_replaced_when_idle() -> None:
    async def scenario() -> None:
        async with running() as engine:
            began = time.monotonic()
            os.kill(engine.worker_pids[0], signal.SIGKILL)
            while engine.health().state is HealthState.HEALTHY:
                assert time.monotonic() - began < 1
                await asyncio.sleep(0.001)
            await healthy(engine)
            await submit(engine, ask([1])).wait()

    run(scenario())


def test_start_up_failures_are_told_with_the_workers_last_words() -> None:
    async def exits() -> None:
        async with running({"exit_at_start": 3}):
            pass

    async def hangs() -> None:
        async with running({"never_ready": True}, worker_startup_timeout_s=0.5):
            pass

    with pytest.raises(StartupError, match=r"exited with status 3[\s\S]*gives up"):
        run(exits())
    with pytest.raises(StartupError, match="not ready after"):
        run(hangs())


def test_a_directory_that_cannot_be_a_tier_is_named() -> None:
    extra = {"cpu_bytes_to_use": 1 << 24, "secondary_tiers": [{"type": "fs", "root_dir": "/proc/nope"}]}

    async def scenario() -> None:
        async with running(kv_transfer_config=json.dumps({"kv_connector_extra_config": extra})):
            pass

    with pytest.raises(StartupError, match="`root_dir` '/proc/nope': No such file or directory"):
        run(scenario())


def test_a_start_of_many_replicas_ends_at_a_signal_before_the_last_is_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One spawn may take long, on a machine that is short of something; a thousand of them in a row took no signal."""
    epochs: list[Epoch] = []
    spawn = Epoch.spawn

    def slow(epoch: Epoch, on_death: Callable[[int], None]) -> None:
        epochs.append(epoch)
        if len(epochs) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        spawn(epoch, on_death)

    async def scenario() -> None:
        monkeypatch.setattr(Epoch, "spawn", slow)
        config = EngineConfig(model="smollm2", worker_module="tests.scripted_worker", data_parallel_size=8)
        engine = Engine(config)
        starting = asyncio.ensure_future(engine.start())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, starting.cancel)
        with pytest.raises(asyncio.CancelledError):
            await starting
        await engine.stop()

    run(scenario())
    assert 2 <= len(epochs) < 8 and not any(epoch.worker.alive for epoch in epochs)


@pytest.mark.parametrize(("failure", "words"), [(NON_FINITE, "not finite"), (NO_TOKEN, "left no token")])
def test_a_broken_model_is_not_called_the_clients_mistake(failure: int, words: str) -> None:
    asked = [
        ({"allowed_token_ids": (7,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (7,), "prompt_logprobs": 1}, "allowed_token_ids"),
        ({"bad_words": ((7,),)}, "bad_words"),
        ({}, None),
    ]

    async def scenario() -> None:
        async with running({"failure": failure}) as engine:
            for more, param in asked:
                last = (await submit(engine, ask([1, 2, 3], **more)).wait()).deltas[-1]
                assert last.finish_reason == "error" and words in (last.error or "")
                assert last.error_param == (param if failure == NO_TOKEN else None)
            if failure == NON_FINITE:
                last = (await submit(engine, ask([1, 2], max_tokens=0, embedding_size=576)).wait()).deltas[-1]
                assert words in (last.error or "") and last.error_param is None

    run(scenario())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 10**9}, "--max-model-len"),
        ({"block_size": 12}, "--block-size"),
        ({"max_num_seqs": 10**8}, r"--max-num-seqs 100000000 .* GiB for the batch table, .* --max-num-seqs \d+$"),
        ({"max_num_seqs": 10**16}, r"with --max-model-len \d+ needs .* such as --max-num-seqs \d+$"),
        ({"max_num_seqs": 10**30}, r"with --max-model-len \d+ needs .* such as --max-num-seqs \d+$"),
        ({"max_model_len": 10**11, "allow_long_max_model_len": True}, "with --max-model-len 100000000000 needs"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "--max-num-batched-tokens"),
        ({"dtype": "int3"}, "--dtype"),
        ({"seed": -5}, "--seed"),
        ({"cpu_threads": 10_000}, "--cpu-threads"),
        (
            {"data_parallel_size": 1000},
            r"--data-parallel-size: 1000 replicas do not fit: .* GiB .* CPUs: use \d+ or less",
        ),
        ({"cpu_affinity": "0|1"}, "--cpu-affinity: must have one list"),
        ({"cpu_affinity": "100000"}, "--cpu-affinity: CPU 100000"),
        ({"cpu_affinity": "0", "cpu_threads": 2}, "--cpu-threads 2 is more than the 1 CPUs of a --cpu-affinity list"),
    ],
)
def test_impossible_settings_name_the_flag(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(EngineConfig(model="smollm2", **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_seqs", "length", "flags"),
    [
        (64, 10**8, {"--max-num-seqs"}),
        (10**16, 8192, {"--max-num-seqs"}),
        (8, 10**10, {"--max-model-len"}),
        (10**16, 10**16, {"--max-model-len", "--max-num-seqs"}),
    ],
)
def test_what_is_suggested_for_the_batch_table_fits(
    num_seqs: int, length: int, flags: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipring.runtime.config.available_bytes", lambda: 16 << 30)
    settings = {"max_num_seqs": num_seqs, "max_model_len": length, "allow_long_max_model_len": True}
    with pytest.raises(ConfigError) as refused:
        Engine(EngineConfig(model="smollm2", **settings))  # type: ignore[arg-type]
    found = re.findall(r"(--[a-z-]+) (\d+)", str(refused.value).rpartition("such as")[2])
    assert {flag for flag, _ in found} == flags
    settings |= {flag[2:].replace("-", "_"): int(value) for flag, value in found}
    Engine(EngineConfig(model="smollm2", **settings))  # type: ignore[arg-type]


def test_draining_finishes_what_is_live_and_refuses_what_is_new() -> None:
    async def scenario() -> None:
        async with running({"step_s": 0.001}) as engine:
            stream = submit(engine, ask([1, 2], 40))
            drain = asyncio.ensure_future(engine.drain(10))
            await asyncio.sleep(0)
            assert engine.health().state is HealthState.DRAINING
            with pytest.raises(EngineDeadError):
                submit(engine, ask([1]))
            await drain
            assert stream.deltas[-1].finish_reason == "length"

    run(scenario())


def test_what_is_aborted_while_paused_counts_no_more() -> None:
    async def scenario() -> None:
        async with running(max_queued_requests=3, max_queued_tokens=100) as engine:
            engine.pause()
            for round_ in range(3):  # each fills the queue again
                requests = [ask([1] * 30, request_id=f"{round_}-{i}") for i in range(3)]
                streams = [submit(engine, request) for request in requests]
                with pytest.raises(QueueFullError):
                    submit(engine, ask([1]))
                await asyncio.sleep(0)
                engine.abort(requests[0].request_id)
                engine.finish(requests[1].request_id)
                engine.finish(requests[2].request_id)
                assert streams[1].deltas[-1].finish_reason == "abort"
            kept = submit(engine, ask([1, 2]))
            engine.resume()
            await kept.wait()
            assert engine._admission._num_hashing == 0 and not engine._admission.num_held
            await settled(engine)

    run(scenario())
