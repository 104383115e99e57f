"""`slipring train-draft`: let the model write, then train a draft head on what it wrote, in a process with torch.

Owns the life of that process: it gets its config on stdin, and answers with one JSON object a line.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import Engine
from slipring.runtime.self_text import SelfText, Writer
from slipring.shm.spec import CHECK_TRAINING, DraftTraining, TrainingReport

_COMMAND = [sys.executable, "-m", "slipring.workers.speculation.training"]
_CONTEXT = 1024
"""Longest text that is written; heads learn nothing from distant tokens."""
_VOCAB_SIZE = 4096
_LEAST_TOKENS = 1000
"""Fewer teach nothing, and leave no text to be held out."""
OnProgress = Callable[[str, int, int, str], None]
"""(phase, done, total, how it goes)"""


class TrainingError(Exception):
    """The message says why."""


class DraftOptions(msgspec.Struct, frozen=True, kw_only=True):
    """As given on the command line."""

    model: str
    method: str
    output: Path
    start: Path | None
    """A head to go on with."""
    num_tokens: int
    epochs: int
    vocab_size: int | None
    text: Path | None
    seed: int
    cpu_threads: int | None


def train_draft(options: DraftOptions, on_progress: OnProgress) -> TrainingReport:
    """Returns the held-out figures. Raises TrainingError, ConfigError, ModelError or StartupError."""
    _check_options(options)
    engine = Engine(
        EngineConfig(
            model=options.model,
            max_num_seqs=64,
            max_model_len=_CONTEXT,
            allow_long_max_model_len=True,
            cpu_threads=options.cpu_threads,
        )
    )
    training = DraftTraining(
        method=options.method,
        model=engine.spec,
        written=[],
        prompts=[],
        greedy=[],
        output=str(options.output),
        start=None if options.start is None else str(options.start),
        epochs=options.epochs,
        vocab_size=_VOCAB_SIZE if options.vocab_size is None else options.vocab_size,
        seed=options.seed,
        num_threads=engine.config.num_threads,
    )
    environment = engine.config.worker_environment()
    if options.start is not None:
        _check(training, environment)
    text = _read_text(options.text)
    _check_output(options.output)
    written = asyncio.run(_write(engine, options, text, on_progress))
    training = msgspec.structs.replace(
        training, written=written.written, prompts=written.prompts, greedy=written.greedy
    )
    return _train(training, environment, on_progress)


def _check_options(options: DraftOptions) -> None:
    if options.start is not None and options.method != "eagle":
        raise TrainingError("--from goes on with EAGLE heads only: Medusa heads begin from nothing")
    if options.start is not None and options.vocab_size is not None:
        raise TrainingError("--vocab-size: a head that training goes on with (--from) keeps its own vocabulary")
    for flag, value, least in (
        ("--tokens", options.num_tokens, _LEAST_TOKENS),
        ("--epochs", options.epochs, 1),
        ("--vocab-size", options.vocab_size, 1),
    ):
        if value is not None and value < least:
            raise TrainingError(f"{flag} must be at least {least}, got {value}")
    if not 0 <= options.seed < 1 << 64:
        raise TrainingError(f"--seed must be from 0 to {(1 << 64) - 1}, got {options.seed}")


def _read_text(path: Path | None) -> str:
    try:
        return "" if path is None else path.read_text(errors="replace")
    except OSError as error:
        raise TrainingError(f"--text {path}: {error.strerror}") from None


def _check_output(path: Path) -> None:
    """Whether the head can be written there: before the model writes for an hour."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise TrainingError(f"--output {path}: {error.strerror}") from None


def _check(training: DraftTraining, environment: dict[str, str]) -> None:
    """Whether there is a head to go on with: before the model writes for an hour."""
    told = msgspec.msgpack.encode(training)
    found = subprocess.run([*_COMMAND, CHECK_TRAINING], input=told, env=environment, stderr=subprocess.PIPE)
    if found.returncode:
        said = found.stderr.decode(errors="replace").strip().splitlines()
        raise TrainingError(f"--from: {said[-1].removeprefix('slipring: ') if said else f'status {found.returncode}'}")


async def _write(engine: Engine, options: DraftOptions, text: str, on_progress: OnProgress) -> SelfText:
    try:
        await engine.start()
        writer = Writer(engine, options.seed, text)
        return await writer.write(options.num_tokens, lambda done, total: on_progress("write", done, total, ""))
    finally:
        await engine.stop()


def _train(training: DraftTraining, environment: dict[str, str], on_progress: OnProgress) -> TrainingReport:
    process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdin is not None and process.stdout is not None
    report = None
    try:
        with process.stdin as pipe:
            pipe.write(msgspec.msgpack.encode(training))
        for line in process.stdout:
            report = msgspec.json.decode(line, type=TrainingReport)
            on_progress(report.phase, report.done, report.total, report.words)
    finally:
        if process.poll() is None and (report is None or not report.final):
            process.kill()
        status = process.wait()
    if status or report is None or not report.final:
        raise TrainingError(f"training ended with status {status}; what it said stands above")
    return report
