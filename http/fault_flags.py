"""The flags about replicas and faults, and what they mean for engine and server."""

from __future__ import annotations

import argparse
import difflib
import json
from typing import Any

from slipring.http.flag_values import seconds

_CONFIG = {"engine_recovery_timeout_sec": 120.0, "auto_recovery": True}
"""Keys of --fault-tolerance-config, and their defaults."""


def add_fault_flags(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("replicas and faults")
    group.add_argument("--data-parallel-size", type=int, default=1, metavar="N", help="replicas (default: %(default)s)")
    group.add_argument(
        "--on-fault",
        default="replay",
        help="replay: streams go on after a worker's death; abort: they end with an error (default: %(default)s)",
    )
    group.add_argument(
        "--hang-limit",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="a step that takes longer means that the worker hangs (default: %(default)g)",
    )
    group.add_argument(
        "--warm-spare",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="keep one more worker per replica, loaded and waiting: recovery takes no start-up (default: off)",
    )
    group.add_argument(
        "--flight-recorder-dir",
        metavar="DIR",
        help="where the last steps before a fault are written, for `slipring blackbox` (default: a temporary folder)",
    )
    group.add_argument(
        "--enable-fault-tolerance",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="answer on /v1/fault_tolerance/apply and /status (default: off)",
    )
    group.add_argument(
        "--fault-tolerance-config",
        type=_config,
        metavar="JSON",
        help="engine_recovery_timeout_sec (120): later than this a broken replica is dead; auto_recovery (true): "
        "false waits for a command. Switches fault tolerance on",
    )


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `EngineConfig`."""
    return {
        "data_parallel_size": args.data_parallel_size,
        "on_fault": args.on_fault,
        "hang_limit_s": args.hang_limit,
        "warm_spare": args.warm_spare,
        "flight_recorder_dir": args.flight_recorder_dir,
        **_CONFIG,
        **(args.fault_tolerance_config or {}),
    }


def commands_enabled(args: argparse.Namespace) -> bool:
    return args.enable_fault_tolerance or args.fault_tolerance_config is not None


def _config(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    for key, value in found.items():
        _check(key, value)
    return found


def _check(key: str, value: object) -> None:
    if key not in _CONFIG:
        near = difflib.get_close_matches(key, _CONFIG, 1, 0.5)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(_CONFIG)}."
        raise argparse.ArgumentTypeError(f"has an unknown key {key[:100]!r}.{hint}")
    if isinstance(_CONFIG[key], bool):
        if not isinstance(value, bool):
            raise argparse.ArgumentTypeError(f"{key!r} must be true or false")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{key!r} must be a number of seconds above 0")
