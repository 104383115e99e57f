"""`slipring train-draft`: a progress bar for each phase, and at the end how often the head is right."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from slipring.runtime.config import ConfigError
from slipring.runtime.engine import StartupError
from slipring.runtime.model import ModelError
from slipring.runtime.train_draft import DraftOptions, TrainingError, train_draft

_WORDS = {"write": "the model writes", "read": "hidden states", "train": "training"}
_BAR_WIDTH = 30


def run(args: argparse.Namespace) -> int:
    """Exit status."""
    options = DraftOptions(
        model=args.model,
        method=args.method,
        output=Path(args.output),
        start=Path(args.start) if args.start else None,
        num_tokens=args.tokens,
        epochs=args.epochs,
        vocab_size=args.vocab_size,
        text=Path(args.text) if args.text else None,
        seed=args.seed,
        cpu_threads=args.cpu_threads,
    )
    try:
        report = train_draft(options, _Bar())
    except (ConfigError, ModelError, StartupError, TrainingError, OSError) as error:
        print(f"\nslipring: {error}", file=sys.stderr)
        return 1
    places = ", ".join(f"{share:.0%}" for share in report.accepted)
    print(f"\nHeld-out text, greedy: {places} of first, second, ... drafts are accepted;", end=" ")
    print(f"mean accepted length {1 + sum(report.accepted):.2f} with a chain of {len(report.accepted)}.")
    config = f'{{"method": "{options.method}", "model": "{options.output}", "num_speculative_tokens": 3}}'
    print(f"Use it: slipring serve {args.model} --speculative-config {shlex.quote(config)}")
    return 0


class _Bar:
    """Redrawn in place on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self._tty = sys.stdout.isatty()
        self._phase, self._shown_at, self._done = "", 0.0, -1

    def __call__(self, phase: str, done: int, total: int, words: str) -> None:
        now = time.monotonic()
        again = phase == self._phase
        if again and (done == self._done or (now - self._shown_at < (0.1 if self._tty else 10.0) and done < total)):
            return
        if self._tty and phase != self._phase and self._phase:
            print()
        self._phase, self._shown_at, self._done = phase, now, done
        share = done / total if total else 1.0
        filled = round(share * _BAR_WIDTH)
        bar = f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:4.0%}  {words}"
        line = f"  {_WORDS.get(phase, phase):<18} {bar}"
        print(f"\r\x1b[K{line}" if self._tty else line, end="" if self._tty else "\n", flush=True)
