"""The CUDA worker without a GPU: tensors on the CPU that pass for a GPU's, so that kernels run where they can.

Under Triton's interpreter (`triton_suite/`) they are interpreted; `HostDevice` stands in for streams and events.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from slipring.shm.spec import ModelSpec
from slipring.workers.cuda.device import HostDevice
from slipring.workers.cuda.runner import CudaRunner
from tests.workers.runner_rig import Rig

IS_CUDA = torch.Tensor.is_cuda.__get__


class OnGpu(TorchFunctionMode):
    """Every tensor says that it is on a GPU, so every wrapper of `kernels/` launches its kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func == IS_CUDA else func(*args, **(kwargs or {}))


class GpuRunner(CudaRunner):
    """As the worker drives it: each step submitted and then landed, with or without graphs."""

    def run(self, step: Any, output: Any) -> None:
        with OnGpu():
            flight = self.submit(step)
        self.land(flight, output)

    def capture_all(self) -> None:
        with OnGpu(), torch.inference_mode():
            for bucket in self.decode.uncaptured():
                self.decode.capture(bucket, lambda: None)


class GpuRig(Rig):
    """A rig whose runner is the CUDA worker's. Its model is loaded as on a GPU: weights stay row-major."""

    runner: GpuRunner

    def __init__(self, spec: ModelSpec, **changes: object) -> None:
        with OnGpu():
            super().__init__(spec, **changes)
            self.runner = GpuRunner(HostDevice(), self.config, self.model, self.kv, self.table, self.grammars)  # pyright: ignore
