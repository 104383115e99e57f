"""Flags of `slipring serve` that say how the model is run: what becomes `runtime.config.EngineConfig`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from slipring.http import fault_flags
from slipring.http.flag_values import size, tokens

if TYPE_CHECKING:
    from slipring.runtime.config import EngineConfig

ENGINE = (
    "model", "dtype", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
    "kv_cache_memory_bytes", "num_gpu_blocks_override", "enable_prefix_caching", "scheduling_policy",
    "async_scheduling", "seed", "cpu_threads", "cpu_affinity", "max_queued_requests", "max_queued_tokens",
    "worker_module", "debug_integrity", "allow_long_max_model_len", "speculative_config", "kv_transfer_config",
    "kv_offloading_size",
)  # fmt: skip
"""Flags that are fields of `runtime.config.EngineConfig`."""


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    _add_model_flags(parser.add_argument_group("model"))
    _add_memory_flags(parser.add_argument_group("KV cache"))
    _add_scheduling_flags(parser.add_argument_group("scheduling"))
    fault_flags.add_fault_flags(parser)
    # For tests and for debugging; --help need not explain them.
    parser.add_argument("--worker-module", default="slipring.workers.main", help=argparse.SUPPRESS)
    parser.add_argument("--debug-integrity", action="store_true", help=argparse.SUPPRESS)


def _add_model_flags(group: Any) -> None:
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    group.add_argument("--device", default="auto", help="auto (the CPU), cpu or cuda:N (default: auto)")
    group.add_argument(
        "--max-model-len",
        type=tokens,
        metavar="TOKENS",
        help="context length, such as 4096 or 4K (default: the model's)",
    )
    group.add_argument(
        "--allow-long-max-model-len",
        action="store_true",
        help="let --max-model-len exceed what the model was trained for",
    )
    group.add_argument("--seed", type=int, default=0, help="for requests without one; 0: random (default: 0)")
    group.add_argument("--cpu-threads", type=int, metavar="N", help="threads of a CPU worker (default: all CPUs)")
    group.add_argument(
        "--cpu-affinity",
        metavar="LIST[|LIST...]",
        help="CPUs of each replica's worker, such as '0-3|4-7' (default: any; threads: one per CPU)",
    )


def _add_memory_flags(group: Any) -> None:
    group.add_argument(
        "--kv-cache-memory-bytes", type=size, metavar="SIZE", help="such as 2G or 512M (default: from free memory)"
    )
    group.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="(default: %(default)s)")
    group.add_argument(
        "--kv-offloading-size", type=float, metavar="GIB", help="keep KV that the pool loses in so much CPU memory"
    )
    group.add_argument(
        "--kv-transfer-config", metavar="JSON", help="the same in full, with files, objects and peers (docs/tiers.md)"
    )
    group.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="exactly so many KV blocks")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV blocks of equal prompt beginnings (default: on)",
    )


def _add_scheduling_flags(group: Any) -> None:
    group.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="most at once (default: %(default)s)")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in one step")
    group.add_argument("--scheduling-policy", default="fcfs", help="fcfs or priority (default: %(default)s)")
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="publish the next step while the last one runs (default: on)",
    )
    group.add_argument(
        "--speculative-config",
        "-sc",
        metavar="JSON",
        help="""draft tokens and verify them, such as '{"method": "ngram", "num_speculative_tokens": 5}'""",
    )
    group.add_argument("--spec-method", metavar="METHOD", help="short for that key of --speculative-config")
    group.add_argument("--spec-model", metavar="PATH", help="likewise, for model")
    group.add_argument("--spec-tokens", type=int, metavar="N", help="likewise, for num_speculative_tokens")
    group.add_argument("--max-queued-requests", type=int, default=4096, metavar="N", help="429 beyond it (%(default)s)")
    group.add_argument("--max-queued-tokens", type=int, default=4_000_000, metavar="N", help="likewise (%(default)s)")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    from slipring.runtime.config import EngineConfig

    settings = {name: getattr(args, name) for name in ENGINE} | {"speculative_config": _speculative_config(args)}
    return EngineConfig(**settings, **fault_flags.engine_settings(args))


def _speculative_config(args: argparse.Namespace) -> str | None:
    """The JSON, with the short flags in it; they are refused beside it."""
    keys = {"method": args.spec_method, "model": args.spec_model, "num_speculative_tokens": args.spec_tokens}
    short = {key: value for key, value in keys.items() if value is not None}
    if not short:
        return args.speculative_config
    if args.speculative_config is not None:
        sys.exit("slipring: give either --speculative-config or --spec-method, --spec-model and --spec-tokens")
    return json.dumps(short)
