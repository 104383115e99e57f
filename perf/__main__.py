"""`python -m perf list | run NAME [--compare] [--quick] [--no-write] [--seed N] [--only NAMES] | render [--check]`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from perf.figure import FIGURES, Options, write
from perf.render import render


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what can be measured")
    run = commands.add_parser("run", help="measure one figure and write perf/results/NAME.json")
    run.add_argument("name", choices=sorted(FIGURES))
    run.add_argument("--compare", action="store_true", help="also run the baseline, in the same run")
    run.add_argument("--quick", action="store_true", help="few samples: does it work, not how fast is it")
    run.add_argument("--no-write", action="store_true", help="leave perf/results as it is")
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--only", metavar="NAMES", help="parts of a figure, such as ngram,free; not written")
    show = commands.add_parser("render", help="rewrite the tables of README.md and docs/figures.md from perf/results")
    show.add_argument("--check", action="store_true", help="only say whether they agree")
    arguments = parser.parse_args()
    if arguments.command == "list":
        for name, module in FIGURES.items():
            print(f"{name:12} {importlib.import_module(module).DESCRIPTION}")
        return 0
    if arguments.command == "render":
        return render(check=arguments.check)
    if arguments.only and not hasattr(importlib.import_module(FIGURES[arguments.name]), "cells"):
        parser.error(f"--only: {arguments.name} has no parts")
    options = Options(arguments.compare, arguments.seed, arguments.quick, arguments.only)
    return _run(arguments.name, options, keep=not (arguments.quick or arguments.no_write or arguments.only))


def _run(name: str, options: Options, keep: bool) -> int:
    measurement = importlib.import_module(FIGURES[name]).measure(options)
    for row in measurement.table:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    if keep:
        print(f"written to {write(name, options, measurement)}")
    print(json.dumps(measurement.summary))
    return 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = None
        status = 0
    sys.exit(status)
