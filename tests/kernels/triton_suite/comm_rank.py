"""One rank of `test_comm.py`: a process of its own that meets the other over shared memory, under the interpreter.

`python -m tests.kernels.triton_suite.comm_rank SCENARIO RANK FD NBYTES`; the last line printed is JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

import torch

from slipring.kernels.all_to_all import ExpertExchange, combine_ref, dispatch_ref
from slipring.kernels.comm import Communicator, Fault, Lanes, all_reduce_ref
from slipring.kernels.peers import SharedPeers
from slipring.shm.ipc import HandleExchange, HandleState, exchange_bytes
from slipring.shm.segment import Segment
from tests.kernels.interpreter import repair

WORLD, EPOCH, NUM_LOCAL, TOP_K = 2, 7, 3, 2
NUM_EPOCHS = 40
"""Twice each combination of what changes from one to the next."""
LANES = Lanes(num_lanes=2, lane_bytes=64 << 10)
DATA_AT = -(-exchange_bytes(WORLD) // 4096) * 4096
SEGMENT_BYTES = DATA_AT + WORLD * LANES.nbytes
# Mostly small, since an interpreted operation takes 50 us; some with several lanes and tiles.
REDUCED = [((1, 977), torch.float32)] * 4 + [((1, 7), torch.bfloat16)] * 5 + [((3, 5000), torch.bfloat16)]
EXCHANGED = [(1, 40, torch.float32)] * 4 + [(3, 24, torch.bfloat16)]
KILLED_AT, SHORT_LIMIT, LONG_LIMIT = 20, 3000, 200_000


def main() -> None:
    scenario, rank, fd, nbytes = sys.argv[1], *map(int, sys.argv[2:])
    repair()
    torch.set_num_threads(1)
    segment = Segment.attach(fd, nbytes)
    exchange = HandleExchange.attach(segment, rank, EPOCH)
    peers = SharedPeers(rank, LANES.nbytes, segment.buf[DATA_AT:])
    exchange.export(peers.export(), peers.nbytes)
    wait(lambda: exchange.handles() is not None)
    group = Communicator(peers, peers.connect(exchange.handles() or ()), LANES, LONG_LIMIT)
    exchange.mapped()
    result = {"exact": exact, "killed": killed}[scenario](group)
    peers.disconnect()
    exchange.unmapped()
    if scenario == "exact":
        wait(lambda: not exchange.waiting_for(HandleState.UNMAPPED))
    peers.close()
    print(json.dumps(result))


def wait(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the peer does not come"
        time.sleep(0.001)


def exact(group: Communicator) -> dict:
    """Epochs, each with both all-reduces, or a dispatch and a combine, of changing shapes, after a random pause."""
    skew = random.Random(group.rank)
    experts = ExpertExchange(group, NUM_LOCAL)
    counts = {"one_shot": 0, "two_shot": 0, "all_to_all": 0}
    for epoch in range(NUM_EPOCHS):
        time.sleep(skew.random() ** 4 * 0.03)
        reduces(group, epoch, counts)
        all_to_all(group, experts, epoch, counts)
    assert group.fault() is None
    return counts


def normal(rank: int, epoch: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What `rank` holds in this epoch: any rank can compute any other's."""
    generator = torch.Generator().manual_seed(epoch * WORLD + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def reduces(group: Communicator, epoch: int, counts: dict[str, int]) -> None:
    shape, dtype = REDUCED[epoch % len(REDUCED)]
    inputs = [normal(rank, epoch, *shape, dtype=dtype) for rank in range(WORLD)]
    for name in ("one_shot", "two_shot"):
        x = inputs[group.rank].clone()
        out = x if epoch % 2 else torch.empty_like(x)  # in place, too
        assert torch.equal(getattr(group, name)(x, out), all_reduce_ref(inputs)), (name, epoch)
        counts[name] += 1


def all_to_all(group: Communicator, exchange: ExpertExchange, epoch: int, counts: dict[str, int]) -> None:
    num_tokens, width, dtype = EXCHANGED[epoch % len(EXCHANGED)]
    inputs = [normal(rank, epoch, num_tokens, width, dtype=dtype) for rank in range(WORLD)]
    chosen = [choose(rank, epoch, num_tokens) for rank in range(WORLD)]
    weights = [normal(rank, epoch, num_tokens, TOP_K).abs() for rank in range(WORLD)]
    arrived = [dispatch_ref(inputs, chosen, weights, rank, NUM_LOCAL) for rank in range(WORLD)]
    rows, local, out_weights = exchange.dispatch(inputs[group.rank], chosen[group.rank], weights[group.rank])
    wanted = (local >= 0).any(-1)
    assert torch.equal(local, arrived[group.rank][1]) and torch.equal(out_weights, arrived[group.rank][2]), epoch
    assert torch.equal(rows[wanted], arrived[group.rank][0][wanted]), epoch
    sums = [expert_sums(*of_rank, rank) for rank, of_rank in enumerate(arrived)]
    out = exchange.combine(sums[group.rank], local, chosen[group.rank])
    assert torch.equal(out, combine_ref(sums, chosen[group.rank], group.rank, NUM_LOCAL)), epoch
    counts["all_to_all"] += 1


def choose(rank: int, epoch: int, num_tokens: int) -> torch.Tensor:
    """Distinct experts a token; now and then a padding token, and one whose experts are all on one rank."""
    generator = torch.Generator().manual_seed(1000 + epoch * WORLD + rank)
    chosen = torch.stack([torch.randperm(WORLD * NUM_LOCAL, generator=generator)[:TOP_K] for _ in range(num_tokens)])
    if epoch % 4 == 3:
        chosen[-1] = -1
    return chosen.int()


def expert_sums(rows: torch.Tensor, local: torch.Tensor, weights: torch.Tensor, rank: int) -> torch.Tensor:
    """Expert e of a rank multiplies by 1 + its global number; rows that nobody wants hold NaN, to see it if read."""
    factor = torch.where(local >= 0, weights * (1 + rank * NUM_LOCAL + local), 0.0).sum(-1, keepdim=True)
    wanted = (local >= 0).any(-1, keepdim=True)
    return torch.where(wanted, rows.float() * factor, float("nan")).to(rows.dtype)


def killed(group: Communicator) -> dict:
    """Rank 1 is killed between two collectives; rank 0 must notice, say who, and have its queue drained at once."""
    x = torch.ones(64)
    for epoch in range(KILLED_AT):
        if epoch == KILLED_AT - 1:
            if group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            group.spin_limit = SHORT_LIMIT
        began = time.monotonic()
        group.one_shot(x)
    noticed = time.monotonic() - began
    fault = group.fault()
    began = time.monotonic()
    untouched = torch.full((64,), -1.0)
    for _ in range(20):
        group.two_shot(x, untouched)
    drained = time.monotonic() - began
    assert fault == group.fault() == Fault(peer=1, phase=2 * KILLED_AT - 1), fault
    assert (untouched == -1).all(), "a poisoned queue writes nothing"
    return {"peer": fault.peer, "noticed_s": noticed, "drained_s": drained}


if __name__ == "__main__":
    main()
