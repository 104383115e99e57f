"""From a `SpeculationSpec` to the worker's proposer."""

from __future__ import annotations

from pathlib import Path

import torch

from slipring.shm.spec import WorkerConfig
from slipring.workers.batch_builder import BatchBuilder
from slipring.workers.constraints import Constraints
from slipring.workers.kv_cache import DTYPES, KvCache
from slipring.workers.loader import ProgressFn, Weights
from slipring.workers.models.registry import build_model
from slipring.workers.runner import Runner
from slipring.workers.speculation.adaptive import AdaptiveProposer
from slipring.workers.speculation.draft_model import DraftModelProposer
from slipring.workers.speculation.eagle import EagleProposer, Target
from slipring.workers.speculation.grammar import GrammarProposer
from slipring.workers.speculation.head_files import load_head
from slipring.workers.speculation.medusa import MedusaProposer
from slipring.workers.speculation.medusa_head import load_medusa
from slipring.workers.speculation.ngram import NgramProposer
from slipring.workers.speculation.proposer import NullProposer, Proposer
from slipring.workers.speculation.step_costs import StepCosts
from slipring.workers.speculation.suffix import Limits, SuffixProposer
from slipring.workers.speculation.tensor_files import refusing
from slipring.workers.speculation.tree_search import TreeShape

_SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128)
"""Tokens of a decode step whose cost is measured at start."""


def build_proposer(
    config: WorkerConfig, runner: Runner, constraints: Constraints, progress: ProgressFn | None = None
) -> Proposer:
    """What grammars force, and the configured proposer under a controller that has measured this machine. Takes two
    or three seconds."""
    if config.speculation is None or config.max_draft == 0:
        return NullProposer()
    spec, num_rows = config.speculation, config.num_rows
    proposer = inner = _proposer(config, runner, progress)
    # Those that draft from tokens alone can be told tokens that are not computed yet.
    told: list[Proposer] = [proposer] if proposer.is_free or isinstance(proposer, DraftModelProposer) else []
    if spec.adaptive:
        free = None
        if not proposer.is_free:
            free = NgramProposer(num_rows, spec.prompt_lookup_min, spec.prompt_lookup_max)
            if told:
                told.append(free)
        inner = AdaptiveProposer(proposer, _step_costs(config, runner), num_rows, spec.tree_depth, free)
    return GrammarProposer(constraints, inner, told, num_rows)


def _step_costs(config: WorkerConfig, runner: Runner) -> StepCosts:
    most = min(config.max_num_seqs * (1 + config.max_draft), config.max_model_len - 1)
    room = runner.kv.num_blocks * config.block_size
    sizes = [size for size in _SIZES if size <= max(2, min(most, room))]
    return StepCosts(sizes, runner.decode_costs(sizes))


def _proposer(config: WorkerConfig, runner: Runner, progress: ProgressFn | None) -> Proposer:
    spec = config.speculation
    assert spec is not None
    if spec.method == "grammar":
        return NullProposer()
    if spec.method == "ngram":
        return NgramProposer(config.num_rows, spec.prompt_lookup_min, spec.prompt_lookup_max, spec.tree_depth)
    if spec.method == "suffix":
        limits = Limits(spec.suffix_depth, spec.suffix_factor, spec.suffix_token_prob)
        return SuffixProposer(config.num_rows, limits, spec.suffix_requests)
    if spec.method == "draft_model":
        return _draft_model(config, runner, progress)
    if spec.method in ("eagle", "medusa"):
        with refusing():
            return (_eagle if spec.method == "eagle" else _medusa)(config, Path(spec.model or ""), runner)
    raise ValueError(f"speculation method {spec.method!r} is not supported")


def _draft_model(config: WorkerConfig, runner: Runner, progress: ProgressFn | None) -> DraftModelProposer:
    spec, dtype = config.speculation.draft if config.speculation else None, DTYPES[config.dtype]
    assert spec is not None
    with torch.inference_mode():
        weights = Weights(spec, dtype, progress)
        model = build_model(spec, weights, config.max_model_len)
        weights.close()
    kv = KvCache(spec, runner.kv.num_blocks, config.block_size, dtype)
    layer_block_bytes = kv.block_bytes // (2 * spec.num_layers)
    group_heads = spec.num_heads // spec.num_kv_heads
    builder = BatchBuilder(runner.table, runner.rows, config.block_size, layer_block_bytes, group_heads, dtype)
    return DraftModelProposer(model, kv, builder, runner.table, runner.rows, runner.sampler, config.model.vocab_size)


def _eagle(config: WorkerConfig, path: Path, runner: Runner) -> EagleProposer:
    target = Target(config.model, runner.model, runner.kv, runner.table, runner.rows, runner.builder, runner.sampler)
    return EagleProposer(target, load_head(path, config.model, config.max_model_len), _shape(config))


def _medusa(config: WorkerConfig, path: Path, runner: Runner) -> MedusaProposer:
    medusa = load_medusa(path, config.model)
    return MedusaProposer(runner.model, runner.rows, runner.sampler, medusa, _shape(config))


def _shape(config: WorkerConfig) -> TreeShape:
    assert config.speculation is not None
    return TreeShape.of(config.speculation.tree_depth, config.max_draft, config.speculation.token_tree)
