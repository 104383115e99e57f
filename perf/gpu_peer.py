"""One rank of the two-process probe: collectives over CUDA IPC, or over shared memory under the interpreter.

`python -m perf.gpu_peer FORM RANK FD NBYTES EPOCHS`, FORM `cuda` or `shared`; the last line printed is JSON. Results
must be exact for every epoch. Two processes on one GPU take turns (time slices), so their times say nothing about
the collectives' own speed; what this proves is that mapping, flags and sums work between processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch

from slipring.kernels.all_to_all import ExpertExchange, combine_ref, dispatch_ref
from slipring.kernels.comm import Communicator, Lanes, all_reduce_ref
from slipring.kernels.peers import CudaPeers, PeerBuffers, SharedPeers
from slipring.shm.ipc import HandleExchange, HandleState, exchange_bytes
from slipring.shm.segment import Segment

WORLD, EPOCH, NUM_LOCAL, TOP_K = 2, 1, 3, 2
LANES = Lanes(num_lanes=2, lane_bytes=64 << 10)
DATA_AT = -(-exchange_bytes(WORLD) // 4096) * 4096
SEGMENT_BYTES = DATA_AT + WORLD * LANES.nbytes
SPIN_LIMIT = 30_000_000
"""Polls. A peer may still be compiling, and on the same GPU it answers only in its next time slice; `gpu_probes.py`
ends both processes long before."""


def main() -> None:
    form, rank, fd, nbytes, epochs = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.kernels.interpreter import repair

        repair()
    segment = Segment.attach(fd, nbytes)
    exchange = HandleExchange.attach(segment, rank, EPOCH)
    peers: PeerBuffers = (
        CudaPeers(rank, LANES.nbytes, 0) if form == "cuda" else SharedPeers(rank, LANES.nbytes, segment.buf[DATA_AT:])
    )
    exchange.export(peers.export(), peers.nbytes)
    wait(lambda: exchange.handles() is not None)
    group = Communicator(peers, peers.connect(exchange.handles() or ()), LANES, SPIN_LIMIT)
    exchange.mapped()
    seconds = run(group, epochs)
    fault = group.fault()
    peers.disconnect()
    exchange.unmapped()
    wait(lambda: not exchange.waiting_for(HandleState.UNMAPPED))
    peers.close()
    assert fault is None, f"waited in vain for {fault}"
    print(json.dumps({"epochs": epochs, "ms_per_epoch": round(1e3 * seconds / epochs, 2)}))


def wait(condition: Callable[[], bool], limit_s: float = 40.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the peer does not come"
        time.sleep(0.001)


def run(group: Communicator, epochs: int) -> float:
    """Seconds, without those of the first epoch, which compiles."""
    experts = ExpertExchange(group, NUM_LOCAL)
    began = time.perf_counter()
    for epoch in range(epochs):
        reduce_both(group, epoch)
        exchange_tokens(group, experts, epoch)
        if epoch == 0 and epochs > 1:
            began = time.perf_counter()
    return time.perf_counter() - began


def normal(rank: int, epoch: int, *shape: int) -> torch.Tensor:
    """What `rank` holds in this epoch: every rank can compute every other's."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(epoch * WORLD + rank))


def reduce_both(group: Communicator, epoch: int) -> None:
    dtype = (torch.bfloat16, torch.float32)[epoch % 2]
    inputs = [normal(rank, epoch, 3, 977).to(dtype) for rank in range(WORLD)]
    expected = all_reduce_ref(inputs)
    for name in ("one_shot", "two_shot"):
        ours = getattr(group, name)(inputs[group.rank].to(group.pointers.device))
        assert torch.equal(ours.cpu(), expected), (name, epoch, group.fault())


def exchange_tokens(group: Communicator, exchange: ExpertExchange, epoch: int) -> None:
    rank, device = group.rank, group.pointers.device
    inputs = [normal(peer, epoch, 3, 40) for peer in range(WORLD)]
    chosen = [choose(peer, epoch) for peer in range(WORLD)]
    weights = [normal(peer, epoch, 3, TOP_K).abs() for peer in range(WORLD)]
    arrived = [dispatch_ref(inputs, chosen, weights, peer, NUM_LOCAL) for peer in range(WORLD)]
    mine = chosen[rank].to(device)
    rows, local, out_weights = exchange.dispatch(inputs[rank].to(device), mine, weights[rank].to(device))
    wanted = (arrived[rank][1] >= 0).any(-1)
    assert torch.equal(local.cpu(), arrived[rank][1]) and torch.equal(out_weights.cpu(), arrived[rank][2]), epoch
    assert torch.equal(rows.cpu()[wanted], arrived[rank][0][wanted]), epoch
    out = exchange.combine(arrived[rank][0].to(device), local, mine)
    assert torch.equal(out.cpu(), combine_ref([rows for rows, *_ in arrived], chosen[rank], rank, NUM_LOCAL)), epoch


def choose(rank: int, epoch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + epoch * WORLD + rank)
    chosen = torch.stack([torch.randperm(WORLD * NUM_LOCAL, generator=generator)[:TOP_K] for _ in range(3)]).int()
    if epoch % 4 == 3:
        chosen[-1] = -1  # a padding token
    return chosen


if __name__ == "__main__":
    main()
