"""Checks that are more than one kernel: a decode step as a graph, collectives of two streams and of two processes.

Each is `probe(setting) -> result`; it raises NotAvailable for what the machine lacks and AssertionError for what is
wrong. Under `--dry` the same code runs under the interpreter with tiny shapes; of the streams only one rank can run
there (one thread cannot wait for itself), the other meeting is that of the two processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perf import gpu_peer
from perf.figure import ROOT
from perf.gpu_case import Maker
from perf.gpu_decode import LLAMA_1B, TINY, DecodeStep
from perf.gpu_served import NotAvailable, die_with_parent, served
from perf.gpu_timing import captured, measure_roof, num_processors
from slipring.kernels.all_to_all import ExpertExchange, combine_ref, dispatch_ref
from slipring.kernels.comm import Communicator, Lanes, all_reduce_ref
from slipring.kernels.paged_decode import choose_num_splits
from slipring.kernels.peers import LocalPeers
from slipring.kernels.streams import NoCuda, cupy
from slipring.shm.ipc import HandleExchange
from slipring.shm.segment import Segment

LOGITS_TOLERANCE = 2e-3
"""Of a tiny fp32 decode step on the device against the references on the CPU; logits are about 1."""

GRAPH_TOLERANCE = 0.1
"""Of a bf16 step's logits, replayed against eager."""


@dataclass(frozen=True)
class Setting:
    dry: bool
    roof: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"


def roof(setting: Setting) -> dict[str, Any]:
    if setting.dry:
        raise NotAvailable("a roof is measured on a device only")
    return measure_roof()


def decode_graph(setting: Setting) -> dict[str, Any]:
    """The step against its references first; then eager against replayed, token for token, and both times."""
    found: dict[str, Any] = {"max_logit_error": compare_step(setting)}
    if setting.dry:
        return found | {"timed": False}
    for batch in (1, 16, 64):
        splits = choose_num_splits(batch, LLAMA_1B.kv_heads, LLAMA_1B.context, num_processors())
        step = DecodeStep(Maker("cuda"), LLAMA_1B, batch, "triton", splits)
        found[f"batch_{batch}"] = _graph(step, setting.roof)
    return found


def compare_step(setting: Setting) -> float:
    ours = DecodeStep(Maker(setting.device), TINY, 3, "triton", 2)
    expected = DecodeStep(Maker("cpu"), TINY, 3, "ref", 1)
    for name, tensor in expected.weights.items():  # two devices draw different numbers from one seed
        ours.weights[name].copy_(tensor)
    ours.pools.copy_(expected.pools)
    error = 0.0
    for _ in range(3):
        tokens = ours.step().cpu(), expected.step()
        error = max(error, (ours.logits.cpu() - expected.logits).abs().max().item())
        assert error <= LOGITS_TOLERANCE, f"logits differ by {error:.3g}, tolerance {LOGITS_TOLERANCE}"
        assert torch.equal(*tokens), f"tokens {tokens[0].tolist()}, the references draw {tokens[1].tolist()}"
        assert torch.equal(ours.computed.cpu(), expected.computed)
    return error


def _graph(step: DecodeStep, roof: dict[str, float]) -> dict[str, Any]:
    eager, logits = step.step(), step.logits.clone()
    step.reset()
    out: list[Tensor] = []
    replay = captured(lambda: out.append(step.step()))
    assert replay is not None, "the step cannot be captured"
    step.reset()
    replay()
    error = (step.logits - logits).abs().max().item()
    # cuBLAS may choose another kernel under capture, so that bf16 rounds differently and a near-tie falls otherwise.
    assert error <= GRAPH_TOLERANCE, f"logits of the replayed step differ by {error:.3g}"
    same = (out[-1] == eager).float().mean().item()
    step.reset()
    replay_us = _mean_us(replay)
    step.reset()
    found = {"replay_us": round(replay_us, 1), "eager_us": round(_mean_us(step.step), 1), "same_tokens": same}
    if best := roof.get("memory_gb_per_s"):
        found["share_of_memory_roof"] = round(step.nbytes / replay_us / 1e3 / best, 3)
    return found


def _mean_us(run: Any, count: int = 20) -> float:
    """Back to back, as a busy server launches them."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e6


class _Streams:
    """Ranks of one process, each on a stream of its own."""

    def __init__(self, setting: Setting, lanes: Lanes, world: int) -> None:
        device = torch.device(setting.device)
        self.dry, self.world, self.device = setting.dry, world, device
        self.peers = [LocalPeers(rank, lanes.nbytes, device) for rank in range(world)]
        handles = [peer.export() for peer in self.peers]
        self.groups = [Communicator(peer, peer.connect(handles), lanes, 2_000_000) for peer in self.peers]
        self.streams = [None if setting.dry else torch.cuda.Stream() for _ in range(world)]

    def each(self, run: Any) -> list[Any]:
        """run(rank), launched for every rank before any is waited for."""
        self.wait()
        results = []
        for rank, stream in enumerate(self.streams):
            if stream is None:
                results.append(run(rank))
            else:
                with torch.cuda.stream(stream):
                    results.append(run(rank))
        self.wait()
        faults = [group.fault() for group in self.groups]
        assert not any(faults), f"a rank waited in vain: {faults}"
        return results

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()


def streams(setting: Setting) -> dict[str, Any]:
    """All-reduce and all-to-all of two ranks on two streams of one process."""
    lanes = Lanes(2, 64 << 10) if setting.dry else Lanes(16, 1 << 20)
    ranks = _Streams(setting, lanes, 1 if setting.dry else 2)
    found: dict[str, Any] = {"ranks": ranks.world}
    shapes = {"16 KiB": (1, 8192), "8 MiB": (1024, 4096)}
    for label, shape in {"small": (3, 977)}.items() if setting.dry else shapes.items():
        make = Maker(setting.device)
        inputs = [make.normal(*shape) for _ in range(ranks.world)]
        expected = all_reduce_ref([x.cpu() for x in inputs])
        for name in ("one_shot", "two_shot"):
            for out in ranks.each(lambda rank, name=name, x=inputs: getattr(ranks.groups[rank], name)(x[rank])):
                assert torch.equal(out.cpu(), expected), f"{name} of {label} is wrong"
            if not setting.dry:
                found[f"{name} {label}"] = _collective_us(ranks, name, inputs)
    found["all_to_all_exact"] = _experts(ranks)
    return found


def _collective_us(ranks: _Streams, name: str, inputs: list[Tensor], count: int = 50) -> dict[str, float]:
    """Launched from one Python thread for both ranks: an upper bound, since launches alternate."""
    ranks.wait()
    began = time.perf_counter()
    for _ in range(count):
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                getattr(ranks.groups[rank], name)(inputs[rank])
    ranks.each(lambda rank: None)
    return {"us_launch_bound": round((time.perf_counter() - began) / count * 1e6, 1)}


def _experts(ranks: _Streams, num_local: int = 3, top_k: int = 2) -> bool:
    world, generator = ranks.world, torch.Generator().manual_seed(1)
    inputs = [torch.randn(5, 40, generator=generator) for _ in range(world)]
    scores = [torch.rand(5, world * num_local, generator=generator) for _ in range(world)]
    chosen = [score.argsort(1)[:, :top_k].int() for score in scores]
    weights = [torch.rand(5, top_k, generator=generator) for _ in range(world)]
    arrived = [dispatch_ref(inputs, chosen, weights, rank, num_local) for rank in range(world)]
    placed = [[x.to(ranks.device) for x in side] for side in (inputs, chosen, weights)]
    exchanges = [ExpertExchange(group, num_local) for group in ranks.groups]
    got = ranks.each(lambda rank: exchanges[rank].dispatch(*(side[rank] for side in placed)))
    for ours, (rows, local, out_weights) in zip(got, arrived, strict=True):
        wanted = (local >= 0).any(-1)
        assert torch.equal(ours[1].cpu(), local) and torch.equal(ours[2].cpu(), out_weights), "dispatch is wrong"
        assert torch.equal(ours[0].cpu()[wanted], rows[wanted]), "dispatched rows are wrong"
    sums = [rows.to(ranks.device) for rows, *_ in arrived]
    back = ranks.each(lambda rank: exchanges[rank].combine(sums[rank], got[rank][1], placed[1][rank]))
    for rank, out in enumerate(back):
        expected = combine_ref([rows for rows, *_ in arrived], chosen[rank], rank, num_local)
        assert torch.equal(out.cpu(), expected), "combine is wrong"
    return True


def processes(setting: Setting) -> dict[str, Any]:
    """The same between two processes: CUDA IPC, or shared memory under the interpreter."""
    if not setting.dry:
        try:
            cupy()
        except NoCuda as error:
            raise NotAvailable(str(error)) from None
    segment = Segment.create("gpu-check", gpu_peer.SEGMENT_BYTES)
    try:
        HandleExchange.create(segment, gpu_peer.WORLD, gpu_peer.EPOCH)
        form, epochs = ("shared", 3) if setting.dry else ("cuda", 20)
        ranks = [_peer(form, rank, segment, epochs) for rank in range(gpu_peer.WORLD)]
        try:
            said = [_finish(process) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    finally:
        segment.close()
    return said[0] | {"form": form, "note": "exact; processes on one GPU take turns, so this is no speed"}


def _peer(form: str, rank: int, segment: Segment, epochs: int) -> subprocess.Popen[str]:
    arguments = (form, rank, segment.fd, segment.nbytes, epochs)
    return subprocess.Popen(
        [sys.executable, "-m", "perf.gpu_peer", *map(str, arguments)], cwd=ROOT, env=dict(os.environ),
        pass_fds=(segment.fd,), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent,
    )  # fmt: skip


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, errors = process.communicate(timeout=50)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
    last = (errors.strip().splitlines() or ["nothing was said"])[-1]
    assert process.returncode == 0, f"a rank ended with {process.returncode}: {last}"
    return json.loads(out.splitlines()[-1])


def serve(setting: Setting) -> dict[str, Any]:
    return served("cpu", 2, 6) | {"timed": False} if setting.dry else served("cuda:0", 16, 64)


PROBES = {
    "decode_graph": (decode_graph, 60.0),
    "comm.streams": (streams, 30.0),
    "comm.processes": (processes, 60.0),
    "served": (serve, 120.0),
}
"""Name -> (probe, seconds that it may take)."""
