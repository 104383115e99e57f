"""From a `SpeculationSpec` to the worker's proposer."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from slipring.shm.spec import WorkerConfig
from slipring.workers.constraints import Constraints
from slipring.workers.link import StartRefused
from slipring.workers.runner import Runner
from slipring.workers.speculation.adaptive import AdaptiveProposer
from slipring.workers.speculation.eagle import EagleProposer, Target
from slipring.workers.speculation.eagle_head import load_head
from slipring.workers.speculation.grammar import GrammarProposer
from slipring.workers.speculation.ngram import NgramProposer
from slipring.workers.speculation.proposer import NullProposer, Proposer
from slipring.workers.speculation.step_costs import StepCosts
from slipring.workers.speculation.suffix import Limits, SuffixProposer

_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Tokens of a decode step whose cost is measured at start."""


def build_proposer(config: WorkerConfig, runner: Runner, constraints: Constraints) -> Proposer:
    """What grammars force, and the configured proposer under a controller that has measured this machine. Takes a
    second or two."""
    if config.speculation is None or config.max_draft == 0:
        return NullProposer()
    most = min(config.max_num_seqs * (1 + config.max_draft), config.max_model_len - 1)
    room = runner.kv.num_blocks * config.block_size
    sizes = [size for size in _SIZES if size <= max(2, min(most, room))]
    costs = StepCosts(sizes, runner.decode_costs(sizes))
    proposer = _proposer(config, runner)
    adaptive = AdaptiveProposer(proposer, costs, config.num_rows, config.speculation.tree_depth)
    return GrammarProposer(constraints, adaptive, proposer if proposer.is_free else None, config.num_rows)


def _proposer(config: WorkerConfig, runner: Runner) -> Proposer:
    spec = config.speculation
    assert spec is not None
    if spec.method == "grammar":
        return NullProposer()
    if spec.method == "ngram":
        return NgramProposer(config.num_rows, spec.prompt_lookup_min, spec.prompt_lookup_max, spec.tree_depth)
    if spec.method == "suffix":
        limits = Limits(spec.suffix_depth, spec.suffix_factor, spec.suffix_token_prob)
        return SuffixProposer(config.num_rows, limits, spec.suffix_requests)
    if spec.method == "eagle":
        return _eagle(config, Path(spec.model or ""), runner)
    raise ValueError(f"speculation method {spec.method!r} is not supported")


def _eagle(config: WorkerConfig, path: Path, runner: Runner) -> EagleProposer:
    target = Target(
        config.model, runner.model, runner.kv, runner.table, runner.rows, runner.builder, runner.sampler
    )
    try:
        return EagleProposer(target, *load_head(path, config.model))
    except (OSError, ValueError, SafetensorError) as error:
        raise StartRefused(f"the head for --speculative-config cannot be loaded: {error}") from error
