"""What a machine means for serving: findings in words, each with the command that fixes it.

Pure: `diagnose` judges a `Machine` and touches nothing. A problem is what keeps the engine from serving at all; advice
is what costs speed or a GPU. The CPU can always serve, so a GPU that is out of use is advice.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from slipring.runtime.machine import Machine

INSTALL_CUDA = "pip install 'slipring[cuda]'"
TORCH_INDEX = "https://download.pytorch.org/whl"
CUDA_MAJOR = 13
"""What cupy-cuda13x and the wheels we test with need of the driver."""
_GPU_PACKAGES = ("triton", "cupy")
LEAST_CAPABILITY = (8, 0)
"""bf16 matrix units."""
LEAST_MEMORY = 1 << 30
LEAST_SHM = 256 << 20
"""Rings and the batch table of a usual model; below it they go to a memfd, which works as well."""
LEAST_OPEN_FILES = 4096


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    ADVICE = "advice"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    subject: str
    level: Level
    text: str
    fix: str = ""
    """A command, or what to change."""


class Diagnosis(msgspec.Struct, frozen=True):
    findings: tuple[Finding, ...]
    cuda: bool
    """Whether every part that a CUDA worker needs is there."""

    @property
    def can_serve(self) -> bool:
        return all(finding.level is not Level.PROBLEM for finding in self.findings)


def diagnose(machine: Machine) -> Diagnosis:
    gpu = tuple(_gpu(machine))
    cuda = bool(machine.gpus) and all(finding.level in (Level.OK, Level.NOTE) for finding in gpu)
    findings = (*_python(machine), *_cpu(machine), *_memory(machine), *_limits(machine), *gpu)
    return Diagnosis(findings, cuda)


def _python(machine: Machine) -> Iterator[Finding]:
    yield Finding("Python", Level.OK, machine.python)
    if machine.missing:
        names = ", ".join(machine.missing)
        yield Finding("packages", Level.PROBLEM, f"not installed: {names}", "pip install --upgrade slipring")
    elif "torch" in machine.packages:
        build = "CUDA build" if machine.torch_has_cuda else "CPU build"
        yield Finding("torch", Level.OK, f"{machine.packages['torch']}, {build}")


def _cpu(machine: Machine) -> Iterator[Finding]:
    features = [text for flag, text in _FEATURES if flag in machine.cpu_features]
    words = (
        f"{machine.cpu or machine.architecture}, {machine.cpus} CPUs, {', '.join(features) or 'no vector extension'}"
    )
    yield Finding("CPU", Level.OK, words)
    if machine.architecture not in ("x86_64", "AMD64"):
        yield Finding("CPU", Level.NOTE, "not x86-64: processes wake each other through the kernel and never spin")
    if machine.cpu_quota is not None and machine.cpu_quota < machine.cpus:
        quota = max(1, int(machine.cpu_quota))
        text = f"the container may use {machine.cpu_quota:g} of the {machine.cpus} CPUs it sees"
        yield Finding("CPU", Level.ADVICE, text, f"slipring serve ... --cpu-threads {quota}")


_FEATURES = (
    ("avx2", "AVX2"),
    ("avx512f", "AVX-512"),
    ("avx512_bf16", "AVX-512 bf16"),
    ("amx_bf16", "AMX bf16"),
    ("asimd", "NEON"),
    ("sve", "SVE"),
    ("bf16", "bf16"),
)


def _memory(machine: Machine) -> Iterator[Finding]:
    text = f"{_gib(machine.available_bytes)} free to us, {_gib(machine.memory_bytes)} in all"
    if machine.available_bytes < LEAST_MEMORY:
        yield Finding("memory", Level.ADVICE, text, "stop other programs, or raise the container's --memory")
    else:
        yield Finding("memory", Level.OK, text)
    shm = f"{_gib(machine.shm_bytes)}, {_gib(machine.shm_free_bytes)} free"
    if machine.shm_free_bytes < LEAST_SHM:
        shm += "; rings and table may go to a memfd instead, which works as well"
        yield Finding("/dev/shm", Level.NOTE, shm, "docker run --shm-size 1g ...")
    else:
        yield Finding("/dev/shm", Level.OK, shm)
    if machine.huge_pages == "never":
        text = "off: a worker that is killed takes longer to be reaped"
        fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("huge pages", Level.ADVICE, text, fix)
    elif machine.huge_pages:
        yield Finding("huge pages", Level.OK, machine.huge_pages)


def _limits(machine: Machine) -> Iterator[Finding]:
    soft, hard = machine.open_files
    words = f"{_count(soft)} (at most {_count(hard)})"
    if 0 <= soft < LEAST_OPEN_FILES:
        # One connection is one descriptor.
        most = 65536 if hard < 0 else min(hard, 65536)
        yield Finding("open files", Level.ADVICE, words, f"ulimit -n {most}")
    else:
        yield Finding("open files", Level.OK, words)


def _gpu(machine: Machine) -> Iterator[Finding]:
    """In the order in which things must be put right."""
    if machine.amd_devices:
        yield Finding(
            "GPU", Level.NOTE, f"{machine.amd_devices} of AMD: kernels compile for gfx942, workers do not use it"
        )
    if not machine.gpus:
        yield _no_gpu(machine)
        for name in _GPU_PACKAGES:
            yield Finding(name, Level.NOTE, f"{machine.packages.get(name, 'not installed')}; only a GPU needs it")
        return
    for gpu in machine.gpus:
        text = f"{gpu.name}, {_gib(gpu.memory_bytes)}, compute capability {gpu.compute_capability}"
        if _numbers(gpu.compute_capability) < LEAST_CAPABILITY:
            yield Finding("GPU", Level.ADVICE, f"{text}; 8.0 is needed", "use another GPU, or the CPU")
        else:
            yield Finding("GPU", Level.OK, text)
    yield _driver(machine)
    yield from _gpu_packages(machine)
    if machine.toolkit:
        yield Finding("CUDA toolkit", Level.NOTE, f"{machine.toolkit}; not needed to serve")


def _no_gpu(machine: Machine) -> Finding:
    if machine.driver:
        text = f"driver {machine.driver} is loaded, but its library finds no GPU from here"
        return Finding("GPU", Level.ADVICE, text, "docker run --gpus all ... (needs nvidia-container-toolkit)")
    if machine.nvidia_devices:
        text = f"{machine.nvidia_devices} NVIDIA GPU on the PCI bus, but no driver"
        return Finding("GPU", Level.ADVICE, text, "install the NVIDIA driver (apt install nvidia-open) and reboot")
    return Finding("GPU", Level.NOTE, "none")


def _driver(machine: Machine) -> Finding:
    text = f"{machine.driver or 'unknown'}, runs CUDA up to {machine.driver_cuda or 'unknown'}"
    if machine.driver_cuda and _numbers(machine.driver_cuda)[0] < CUDA_MAJOR:
        return Finding("driver", Level.ADVICE, f"{text}; CUDA {CUDA_MAJOR} is needed", "install driver 580 or newer")
    return Finding("driver", Level.OK, text)


def _gpu_packages(machine: Machine) -> Iterator[Finding]:
    if "torch" in machine.packages and not machine.torch_has_cuda:
        fix = f"pip install --force-reinstall torch --index-url {TORCH_INDEX}/cu{CUDA_MAJOR}0"
        yield Finding("torch", Level.ADVICE, "a CPU build cannot use the GPU", fix)
    for name in _GPU_PACKAGES:
        if name in machine.packages:
            yield Finding(name, Level.OK, machine.packages[name])
        else:
            yield Finding(name, Level.ADVICE, "not installed; GPU workers need it", INSTALL_CUDA)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _count(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)
