"""Speculation on the real model: time per output token with it, against without, in interleaved runs.

Engines stand side by side and take turns, another one begins each time, so that what else the machine does hits all.
With 64 streams, where runs differ most and drafts may cost the least, plain decoding runs again between any two others,
each is judged by the plain runs next to it, and a run is timed from its first request to its last token.
Every stream must give the same tokens with and without (float32; near ties are excused, as everywhere).
`SPECULATION_HEAD` names the directory of another draft head (`slipring train-draft`) than the repository's.

`--only` takes methods and workloads, separated by commas: `--only ngram,free`. All of it takes half an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import jsonschema
import uvloop

from perf.figure import Measurement, Options, in_turns
from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.grammar import Grammar, GrammarSpec
from slipring.runtime.request import Delta, GenerationRequest
from slipring.shm.params import SamplingParams

DESCRIPTION = "speculation against none: accepted length and time per output token, by method and kind of text"
_LIST = "alpha, beta, gamma, delta, epsilon, zeta, eta, theta, iota, kappa, lambda, mu, nu, xi, omicron, pi, rho"
REPEATING = [f"Copy the list.\nList: {_LIST}\nCopy: {_LIST}\nCopy: {_LIST}\nCopy:"]
FREE = ["Write a short story about a lighthouse.", "Explain photosynthesis to a child."]
FORM = ["Marie Curie, born in Warsaw in 1867, a physicist. Answer in JSON."]
_TEXT = {"type": "string", "maxLength": 24}
SCHEMA = {
    "type": "object",
    "properties": {
        "full_name": _TEXT,
        "place_of_birth": _TEXT,
        "year_of_birth": {"type": "integer", "minimum": 1000, "maximum": 2000},
        "occupation": {"enum": ["mathematician", "physicist", "chemist", "painter"]},
        "is_still_alive": {"type": "boolean"},
    },
    "required": ["full_name", "place_of_birth", "year_of_birth", "occupation", "is_still_alive"],
    "additionalProperties": False,
}
BUSY = "64 streams"
WORKLOADS = ("repeating", "free", BUSY, "structured")
NUM_STREAMS = 64
MOST_DIFFERENT = 0.02
HEAD = Path(__file__).parents[1] / "heads" / "smollm2-eagle"
PLAIN = "none"
_TOKENS = {"repeating": 96, "free": 48, BUSY: 20, "structured": 160}
"""Most output tokens of a stream."""


@dataclass
class Stream:
    prompt: list[int]
    temperature: float = 0.0
    seed: int = 1
    grammar: Grammar | None = None
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def tpot_s(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


@dataclass
class Run:
    streams: list[Stream]
    seconds: float
    """Per output token and stream; with many of them, prompts included."""


def measure(options: Options) -> Measurement:
    return uvloop.run(_measure(options))


def methods() -> dict[str, dict[str, object]]:
    """`--speculative-config` by name. The wide ones may draft for 64 rows too, which is not the default."""
    wide: dict[str, object] = {"num_speculative_tokens_per_batch_size": [[1, NUM_STREAMS, 5]]}
    found: dict[str, dict[str, object]] = {
        "ngram": {"method": "ngram"},
        "ngram wide": {"method": "ngram"} | wide,
        "suffix": {"method": "suffix"},
        "suffix wide": {"method": "suffix"} | wide,
        "grammar": {"method": "grammar"},
    }
    head = Path(os.environ.get("SPECULATION_HEAD", HEAD))
    method = json.loads((head / "config.json").read_text()).get("method", "eagle")
    found[method] = {"method": method, "model": str(head)}
    found[f"{method} wide"] = found[method] | wide
    if method == "eagle":
        found["eagle tree"] = found[method] | {"num_speculative_tokens": 6, "num_draft_tree_tokens": 16}
    return found


def cells(options: Options) -> list[tuple[str, str]]:
    """(method, workload) in their order. Raises SystemExit for a name that is neither."""
    every = [(method, workload) for method in methods() for workload in WORKLOADS if _is_told(method, workload)]
    wanted = {name.strip() for name in (options.only or "").split(",")} - {""}
    if unknown := wanted - set(WORKLOADS) - set(methods()):
        known = ", ".join([*methods(), *WORKLOADS])
        raise SystemExit(f"perf: --only {sorted(unknown)[0]!r} is no method and no workload; there are {known}")
    of_methods, of_workloads = wanted & set(methods()), wanted & set(WORKLOADS)
    return [
        (method, workload)
        for method, workload in every
        if (not of_methods or method in of_methods) and (not of_workloads or workload in of_workloads)
    ]


def _is_told(method: str, workload: str) -> bool:
    """Whether a method means anything to a workload beyond what another one shows."""
    if method in ("grammar", "eagle tree"):
        return workload == ("structured" if method == "grammar" else "free")
    return (workload == BUSY) if "wide" in method else (method, workload) != ("suffix", BUSY)


async def _measure(options: Options) -> Measurement:
    summary, table, samples = {}, [], {}
    wanted = cells(options)
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        for method in (PLAIN, *dict.fromkeys(method for method, _ in wanted)):
            engines[method] = await _engine(None if method == PLAIN else json.dumps(methods()[method]))
            stack.push_async_callback(engines[method].stop)
        for workload in dict.fromkeys(workload for _, workload in wanted):
            of_workload = [method for method, each in wanted if each == workload]
            taking_part = {method: engines[method] for method in (PLAIN, *of_workload)}
            for row, ratios in await _compare(taking_part, workload, options):
                table.append(row)
                key = f"{row['method']}_{workload}".replace(" ", "_")
                summary |= {f"{name}_{key}": row[name] for name in ("tpot_ratio", "accepted_length_mean")}
                if row["valid_share"] != "":
                    summary[f"valid_share_{key}"] = row["valid_share"]
                samples[key] = ratios
    return Measurement(summary, table, samples, "tpot_ratio: without / with, so larger is better; the bonus is counted")


async def _compare(engines: dict[str, Engine], workload: str, options: Options) -> list[tuple[dict, list[float]]]:
    """A row for each engine but the plain one, and the ratio of each pair of runs."""
    names = list(engines)
    times, valid = {name: list[float]() for name in names}, {name: list[bool]() for name in names}
    ratios = {name: list[float]() for name in names[1:]}
    before = {name: engine.stats() for name, engine in engines.items()}
    for number in range(3 if options.quick else 6):
        order = _order(names, number, workload)
        runs = [
            await _run(engines[name], workload, options, f"{workload}-{number}-{place}-{name}".replace(" ", "-"))
            for place, name in enumerate(order)
        ]
        plain = [place for place, name in enumerate(order) if name == PLAIN]
        for place, (name, run) in enumerate(zip(order, runs, strict=True)):
            _assert_equal(runs[plain[0]].streams, run.streams)
            valid[name] += [_is_valid(engines[name], stream) for stream in run.streams if stream.grammar is not None]
            if not number:  # caches fill, and the controller learns
                continue
            times[name].append(run.seconds)
            if name != PLAIN:
                nearest = min(abs(p - place) for p in plain)
                without = statistics.mean(runs[p].seconds for p in plain if abs(p - place) == nearest)
                ratios[name].append(round(without / run.seconds, 4))
    found = []
    for name in names[1:]:
        stats = engines[name].stats()
        accepted = stats.num_accepted_tokens - before[name].num_accepted_tokens
        drafts = stats.num_drafts - before[name].num_drafts
        row = {
            "method": name,
            "workload": workload,
            "accepted_length_mean": round(1 + accepted / max(1, drafts), 3),
            "tpot_ratio": round(statistics.median(ratios[name]), 3),
            "tpot_ms_without": round(statistics.median(times[PLAIN]) * 1e3, 2),
            "tpot_ms_with": round(statistics.median(times[name]) * 1e3, 2),
            "valid_share": round(statistics.mean(valid[name]), 4) if valid[name] else "",
        }
        found.append((row, ratios[name]))
    return found


def _order(names: list[str], number: int, workload: str) -> list[str]:
    """Who runs after whom in this round; the plain one is `names[0]`."""
    if workload != BUSY:
        return in_turns(names, number)
    return [PLAIN, *(each for name in in_turns(names[1:], number) for each in (name, PLAIN))]


def _assert_equal(without: list[Stream], with_drafts: list[Stream]) -> None:
    different = sum(a.tokens != b.tokens for a, b in zip(without, with_drafts, strict=True))
    assert different <= MOST_DIFFERENT * len(without), f"{different} of {len(without)} streams differ"


def _is_valid(engine: Engine, stream: Stream) -> bool:
    try:
        jsonschema.validate(json.loads(engine.tokenizer.decode(stream.tokens)), SCHEMA)
    except ValueError:
        return False
    except jsonschema.ValidationError:
        return False
    return True


async def _engine(config: str | None) -> Engine:
    engine = Engine(
        EngineConfig(
            model="smollm2",
            dtype="float32",
            max_num_seqs=NUM_STREAMS,
            max_model_len=1024,
            kv_cache_memory_bytes=1 << 29,
            enable_prefix_caching=False,
            speculative_config=config,
        )
    )
    await engine.start()
    return engine


async def _run(engine: Engine, workload: str, options: Options, name: str) -> Run:
    """The workload's streams: one after the other, or 64 at once."""
    num_tokens = max(16, _TOKENS[workload] // 3) if options.quick and workload != "structured" else _TOKENS[workload]
    streams = await _streams(engine, workload)
    if workload == BUSY:
        began = time.perf_counter()
        await asyncio.gather(*[_generate(engine, s, f"{name}-{i}", num_tokens) for i, s in enumerate(streams)])
        each = statistics.mean(len(stream.tokens) for stream in streams)
        return Run(streams, (max(stream.times[-1] for stream in streams) - began) / each)
    for number, stream in enumerate(streams):
        await _generate(engine, stream, f"{name}-{number}", num_tokens)
    return Run(streams, statistics.mean(stream.tpot_s for stream in streams))


async def _streams(engine: Engine, workload: str) -> list[Stream]:
    encode, template = engine.tokenizer.encode, engine.chat_template
    assert template is not None

    def asked(text: str) -> list[int]:
        return encode(template.render([{"role": "user", "content": text}]))

    if workload == "repeating":
        return [Stream(encode(text)) for text in REPEATING]
    if workload == "free":
        return [Stream(asked(text)) for text in FREE]
    if workload == "structured":
        grammar = await engine.compile_grammar(GrammarSpec("json_schema", json.dumps(SCHEMA)), "schema")
        return [Stream(asked(text), 0.7, 5, grammar) for text in FORM]
    return [Stream(asked(FREE[i % len(FREE)]), 0.8 if i % 2 else 0.0, i) for i in range(NUM_STREAMS)]


async def _generate(engine: Engine, stream: Stream, request_id: str, num_tokens: int) -> None:
    done = asyncio.Event()

    def sink(delta: Delta) -> None:
        stream.tokens += delta.token_ids
        stream.times += [time.perf_counter()] * len(delta.token_ids)
        if delta.finish_reason is not None:
            done.set()

    stops = engine.spec.eos_token_ids if stream.grammar is not None else ()
    params = SamplingParams(
        max_tokens=num_tokens, temperature=stream.temperature, seed=stream.seed, stop_token_ids=tuple(stops)
    )
    engine.submit(
        GenerationRequest(request_id=request_id, prompt_token_ids=stream.prompt, params=params, grammar=stream.grammar),
        sink,
    )
    await done.wait()
