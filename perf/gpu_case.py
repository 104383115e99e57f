"""What a kernel check is: inputs at some size, the kernel, its reference on the CPU, and how the two are compared.

A `Case` is built by a `Maker` for a device: the GPU, the CPU under Triton's interpreter (`--dry`), or `meta`, where
a large case is only shaped. References always run on the CPU, on copies that were taken before the kernel ran, and
for a large case only on the part of the result that `pick` names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.kernels.tolerances import ATTENTION_TOLERANCE, TOLERANCE

FP8 = torch.float8_e4m3fn
Outputs = Sequence[Tensor]
BF16_TOLERANCE = TOLERANCE[torch.bfloat16]
FP32_TOLERANCE = TOLERANCE[torch.float32]
ATTENTION = ATTENTION_TOLERANCE[torch.bfloat16]


@dataclass(frozen=True)
class Case:
    run: Callable[[], Outputs]
    """Launches the kernel on the device; may be repeated."""
    ref: Callable[[], Outputs]
    """The reference's results, on the CPU. To be called before `run`, which may work in place."""
    tolerance: float | None = None
    """Largest difference of floats, absolute up to 1 and relative beyond; None: equal, byte for byte."""
    mismatches: float = 0.0
    """Share of integers that may differ: near-ties of draws, decided by the last bit of an exponential."""
    nbytes: int = 0
    """What the operation must at least read and write."""
    flops: int = 0
    roof: str = "memory"
    """Which roof its share is reported of: `memory`, `bf16` or `fp8`; `none` for what only costs a launch."""
    pick: Callable[[Outputs], Outputs] = tuple
    """The part of `run`'s results that `ref` computes."""


@dataclass(frozen=True)
class Check:
    name: str
    kernels: str
    """The module in `kernels/` that it covers."""
    build: Callable[..., Case]
    small: tuple[Any, ...]
    """Arguments of `build` after the maker; irregular, and cheap enough for the interpreter."""
    large: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Label -> arguments of a size that a server has; these are timed."""


class Maker:
    """Inputs on one device, from one seed."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = torch.device(device)
        self._host = torch.Generator().manual_seed(seed)
        self._own = None if device == "meta" else torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=self._own, device=self.device)
        return (x if scale == 1.0 else x.mul_(scale)).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=self._own, device=self.device, dtype=dtype)

    def shuffled(self, count: int) -> Tensor:
        """A permutation, int64, on the CPU."""
        return torch.randperm(count, generator=self._host)

    def put(self, x: Tensor) -> Tensor:
        return x.to(self.device)

    def listed(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return self.put(torch.tensor(values, dtype=dtype))


def host(x: Tensor) -> Tensor:
    """A copy on the CPU, of what is on the CPU too."""
    return x.clone() if x.device.type == "cpu" else x.cpu()


@dataclass(frozen=True)
class Verdict:
    max_error: float
    """Of floats."""
    mismatches: float
    """Share of integers that differ."""
    equal: bool
    """Byte for byte."""
    problem: str = ""


def judge(case: Case, ours: Outputs, expected: Outputs) -> Verdict:
    """Compare what the kernel left with what the reference did. Infinities must be the same, and NaN is never right."""
    if [(x.shape, x.dtype) for x in ours] != [(x.shape, x.dtype) for x in expected]:
        shapes = [[(list(x.shape), str(x.dtype)) for x in side] for side in (ours, expected)]
        return Verdict(math.inf, 1.0, False, f"results are {shapes[0]}, the reference's {shapes[1]}")
    pairs = [(a.cpu(), b) for a, b in zip(ours, expected, strict=True)]
    if all(torch.equal(_bytes(a), _bytes(b)) for a, b in pairs) and not any(b.isnan().any() for b in expected):
        return Verdict(0.0, 0.0, True)
    error = max((_error(a, b) for a, b in pairs if a.is_floating_point()), default=0.0)
    shares = [(a != b).float().mean().item() for a, b in pairs if not a.is_floating_point() and a.numel()]
    share = max(shares, default=0.0)
    problem = ""
    if case.tolerance is None and error > 0:
        problem = f"differs by up to {error:.3g} where it should be equal"
    elif case.tolerance is not None and not error <= case.tolerance:
        problem = f"differs by up to {error:.3g}, tolerance {case.tolerance:.3g}"
    elif share > case.mismatches:
        problem = f"{share:.2%} of the integers differ, allowed {case.mismatches:.2%}"
    return Verdict(error, share, False, problem)


def _error(ours: Tensor, expected: Tensor) -> float:
    a, b = ours.double(), expected.double()
    if a.isnan().any():
        return math.inf
    # Infinities (a masked token's logarithm) of one sign are the same; their difference would be NaN.
    error = torch.where(a == b, 0.0, (a - b).abs() / b.abs().clamp(min=1))
    return error.nan_to_num(math.inf).max().item() if a.numel() else 0.0


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8) if x.numel() else x


def spoiled(outputs: Outputs) -> Outputs:
    """What a broken kernel might leave: one element of each result is off by a good deal."""
    wrong = []
    for x in (host(x) for x in outputs):
        flat = x.contiguous().flatten()
        if x.dtype == torch.bool:
            flat[0] = ~flat[0]
        elif x.is_floating_point():
            wide = flat.float()
            at = int(wide.isfinite().int().argmax())
            wide[at] = wide[at] + 2 + wide[at].abs() if wide[at].abs() < 100 else 0.0
            flat = wide.to(x.dtype)
        else:
            flat += 1
        wrong.append(flat.view(x.shape))
    return tuple(wrong)
