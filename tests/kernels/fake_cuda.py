"""Steps of the CUDA runner over fake device tensors: what the interpreter cannot show, because there all is one device.

Run as a process of its own (`test_fake_cuda.py`), since Triton must be imported, and not interpreted. Launches are
recorded instead of run. Fake tensors refuse operations over two devices, and everything that would need a value: so
a step that is submitted here mixes no devices, and makes the host wait for nothing. Each launch is also reduced to
what Triton would compile it by: serving launches nothing that the start has not launched. torch's CPU build indexes
no fake CUDA tensors, so the device is a private one that passes for a GPU.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from typing import Any

os.environ["SLIPRING_COMPILE_KERNELS"] = "1"

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from triton.runtime.jit import JITFunction

from slipring.kernels import linear
from slipring.shm.params import SamplingParams
from slipring.workers.cuda.device import HostDevice
from slipring.workers.cuda.runner import CudaRunner
from slipring.workers.cuda.startup import measure, warm_up
from slipring.workers.kv_cache import DTYPES, KvCache
from slipring.workers.loader import Weights
from slipring.workers.quantized import Part, QuantizedLinear
from tests.kernels.on_gpu import OnGpu
from tests.workers import runner_rig
from tests.workers.quantized_checkpoints import FORMATS, save_quantized
from tests.workers.runner_rig import GREEDY, Rig
from tests.workers.tiny_models import save_tiny

EDITED = SamplingParams(
    max_tokens=1, seed=3, repetition_penalty=1.3, logit_bias=((9, 2.0),), min_tokens=3, stop_token_ids=(7,), logprobs=3
)
SCORED = SamplingParams(max_tokens=1, prompt_logprobs=2, allowed_token_ids=(5, 6), bad_words=((5,), (6, 5)))
launches: Counter[str] = Counter()
compiled: set[tuple[Any, ...]] = set()
serving = False


class FakeCuda(HostDevice):
    """As `HostDevice`, but device memory is fake memory of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.device("fakegpu:0")

    def upload(self, array: NDArray[Any]) -> Tensor:
        # Not a copy: a fake copy of a single number would be calculated with for real.
        return torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, device=self.torch)


def launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In the place of a launch."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    elsewhere = [(x.device, tuple(x.shape)) for x in tensors if x.device.type != "fakegpu"]
    assert tensors and not elsewhere, f"{kernel.__name__} is given tensors of another device: {elsewhere}"
    assert all(int(n) > 0 for n in grid), f"{kernel.__name__}: grid {grid}"
    launches[kernel.__name__] += 1
    key = (kernel.__name__, *kwargs.items(), *map(specialization, kernel.params, args))
    assert not serving or key in compiled, f"compiled in the middle of serving: {key}"
    compiled.add(key)


def specialization(param: Any, value: Any) -> tuple[Any, ...]:
    """What of an argument goes into Triton's cache key."""
    if isinstance(value, Tensor):
        begin = value.storage_offset() * value.itemsize % 16
        return (value.dtype, param.do_not_specialize_on_alignment or begin == 0)
    if isinstance(value, int) and not param.do_not_specialize:
        return ("int", value == 1, value % 16 == 0)
    return (type(value),)


def to_cuda(owner: Any, mode: FakeTensorMode) -> None:
    """Every tensor of a model becomes a fake one on a GPU."""
    for name, value in vars(owner).items():
        if isinstance(value, Tensor):
            setattr(owner, name, mode.from_tensor(value).to("fakegpu:0"))
        elif isinstance(value, list):
            for item in value:
                to_cuda(item, mode)
        elif isinstance(value, QuantizedLinear):
            value.parts = [part_on_cuda(part, mode) for part in value.parts]
        elif type(value).__module__.startswith("slipring.workers.models"):
            to_cuda(value, mode)


def part_on_cuda(part: Part, mode: FakeTensorMode) -> Part:
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return dataclasses.replace(part, **{name: mode.from_tensor(x).to("fakegpu:0") for name, x in tensors.items()})


class Submitting(CudaRunner):
    """Submits only: what comes back has no values."""

    def run(self, step: Any, output: Any) -> None:
        flight = self.submit(step)
        assert isinstance(flight.buffers.tokens, FakeTensor)
        self._buffers.give_back(flight.buffers)
        num_rows = int(step.header[step.NUM_ROWS])
        output.num_accepted[:num_rows] = np.isin(np.arange(num_rows), flight.sampled)
        output.tokens[:num_rows] = 5


def main(family: str, folder: str) -> None:
    linear._onednn_runs = lambda dtype: False  # weights stay row-major, as on a GPU
    _setup_privateuseone_for_python_backend("fakegpu")
    JITFunction.run = launch  # pyright: ignore[reportAttributeAccessIssue]
    from pathlib import Path

    if family in FORMATS:
        spec, _ = save_quantized(family, Path(folder))
        runner_rig.Weights = lambda *args: Weights(*args, keep_quantized=True)  # pyright: ignore
    else:
        spec, _ = save_tiny(family, Path(folder))
    rig = Rig(spec, dtype="bfloat16", max_num_seqs=3)
    with OnGpu(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        device = FakeCuda()
        to_cuda(rig.model, mode)
        kv = KvCache(spec, 64, rig.config.block_size, DTYPES["bfloat16"], device.torch)
        rig.runner = Submitting(device, rig.config, rig.model, kv, rig.table, rig.grammars)  # pyright: ignore
        measure(rig.config, rig.runner, device, (1 << 40, 0, 0))  # pyright: ignore[reportArgumentType]
        warm_up(rig.config, rig.runner, device)  # pyright: ignore[reportArgumentType]
        global serving
        serving = True
        rows = [rig.admit([5, 9, 200, 31], GREEDY), rig.admit([7] * 20, EDITED), rig.admit([8] * 9, SCORED)]
        rig.run([], [(rows[0], 4)])
        rig.run([rows[0]], [(rows[1], 11), (rows[2], 9)])
        rig.run([rows[0]], [(rows[1], 9)])
        for _ in range(9):
            rig.run(rows)
            rig.run([rows[0], rows[2]])
        for num_tokens in (70, 33, 16):  # products have tiles by the number of tokens
            rig.run([rows[0]], [(rig.admit([9] * num_tokens, GREEDY), num_tokens)])
    print(" ".join(sorted(launches)))


if __name__ == "__main__":
    main(*sys.argv[1:])
