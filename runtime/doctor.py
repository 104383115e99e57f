"""What a machine means for serving on a device: findings in words, each with the command that fixes it.

Pure: `diagnose` judges a `Machine` and touches nothing. A problem is what keeps the engine from serving on the device
that was asked for; advice is what costs speed, or a GPU that was not asked for. Without `--device` that is the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from slipring.runtime.cpu_features import lacks_bfloat16
from slipring.runtime.machine import Machine

INSTALL_CUDA = "pip install 'slipring[cuda]'"
TORCH_INDEX = "https://download.pytorch.org/whl"
CUDA_MAJOR = 13
"""What cupy-cuda13x and the wheels we test with need of the driver."""
GPU_GENERATIONS = (9, 10)
"""Major compute capabilities that the kernels are compiled and checked for (`kernels/spec.py`): Hopper, Blackwell."""
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
    device: str
    """Whose verdict this is: `cpu` or `cuda:N`."""
    cuda: bool
    """Whether every part that a CUDA worker needs is there, and a GPU for it (the one asked for, if any)."""

    @property
    def can_serve(self) -> bool:
        return all(finding.level is not Level.PROBLEM for finding in self.findings)


def diagnose(machine: Machine, device: str = "cpu") -> Diagnosis:
    """`device`: `cpu` or `cuda:N`."""
    wanted = int(device.removeprefix("cuda:")) if device.startswith("cuda:") else None
    gpu = tuple(_gpu(machine, wanted))
    usable = range(len(machine.gpus)) if wanted is None else (wanted,)
    cuda = any(_is_supported(machine, index) for index in usable) and not any(_blocks(finding) for finding in gpu)
    findings = (*_python(machine), *_cpu(machine), *_memory(machine), *_limits(machine), *gpu)
    return Diagnosis(findings, device, cuda)


def _is_supported(machine: Machine, index: int) -> bool:
    if index >= len(machine.gpus):
        return False
    return _numbers(machine.gpus[index].compute_capability)[0] in GPU_GENERATIONS


def _blocks(finding: Finding) -> bool:
    """Whether no GPU at all can be used before it is mended; a GPU of its own is `_is_supported`'s to judge."""
    return finding.level in (Level.ADVICE, Level.PROBLEM) and finding.subject != "GPU"


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
    if lacks_bfloat16(machine.cpu_features):
        text = "no bf16 instructions: --dtype bfloat16 is several times slower here than float32, which auto takes"
        yield Finding("CPU", Level.NOTE, text)
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


def _gpu(machine: Machine, wanted: int | None) -> Iterator[Finding]:
    """In the order in which things must be put right. `wanted`: the GPU that was asked for; None: the CPU was."""
    fault = Level.ADVICE if wanted is None else Level.PROBLEM
    if machine.amd_devices:
        yield Finding(
            "GPU", Level.NOTE, f"{machine.amd_devices} of AMD: kernels compile for gfx942, workers do not use it"
        )
    if not machine.gpus:
        yield _no_gpu(machine, wanted)
        yield Finding("triton", Level.NOTE, f"{machine.packages.get('triton', 'not installed')}; only a GPU needs it")
        yield _cupy(machine)
        return
    for index, gpu in enumerate(machine.gpus):
        text = f"{index}: {gpu.name}, {_gib(gpu.memory_bytes)}, compute capability {gpu.compute_capability}"
        if _is_supported(machine, index):
            yield Finding("GPU", Level.OK, text)
        else:
            level = fault if wanted in (None, index) else Level.ADVICE
            yield Finding("GPU", level, f"{text}; {_GENERATIONS} are supported", "use another GPU, or --device cpu")
    if wanted is not None and wanted >= len(machine.gpus):
        text = f"there is no cuda:{wanted}, the last one is cuda:{len(machine.gpus) - 1}"
        yield Finding("GPU", Level.PROBLEM, text, "slipring serve ... --device cuda:0")
    yield _driver(machine, fault)
    yield from _gpu_packages(machine, fault)
    if machine.toolkit:
        yield Finding("CUDA toolkit", Level.NOTE, f"{machine.toolkit}; not needed to serve")


_GENERATIONS = " and ".join(f"{major}.x" for major in GPU_GENERATIONS)


def _no_gpu(machine: Machine, wanted: int | None) -> Finding:
    fault = Level.ADVICE if wanted is None else Level.PROBLEM
    if machine.driver:
        text = f"driver {machine.driver} is loaded, but its library finds no GPU from here"
        return Finding("GPU", fault, text, "docker run --gpus all ... (needs nvidia-container-toolkit)")
    if machine.nvidia_devices:
        text = f"{machine.nvidia_devices} NVIDIA GPU on the PCI bus, but no driver"
        return Finding("GPU", fault, text, "install the NVIDIA driver (apt install nvidia-open) and reboot")
    if wanted is not None:
        return Finding("GPU", Level.PROBLEM, f"none, so no cuda:{wanted}", "slipring serve ... --device cpu")
    return Finding("GPU", Level.NOTE, "none")


def _driver(machine: Machine, fault: Level) -> Finding:
    text = f"{machine.driver or 'unknown'}, runs CUDA up to {machine.driver_cuda or 'unknown'}"
    if machine.driver_cuda and _numbers(machine.driver_cuda)[0] < CUDA_MAJOR:
        return Finding("driver", fault, f"{text}; CUDA {CUDA_MAJOR} is needed", "install driver 580 or newer")
    return Finding("driver", Level.OK, text)


def _gpu_packages(machine: Machine, fault: Level) -> Iterator[Finding]:
    if "torch" in machine.packages and not machine.torch_has_cuda:
        fix = f"pip install --force-reinstall torch --index-url {TORCH_INDEX}/cu{CUDA_MAJOR}0"
        yield Finding("torch", fault, "a CPU build cannot use the GPU", fix)
    if "triton" in machine.packages:
        yield Finding("triton", Level.OK, machine.packages["triton"])
    else:
        yield Finding("triton", fault, "not installed; GPU workers need it", INSTALL_CUDA)
    yield _cupy(machine)


def _cupy(machine: Machine) -> Finding:
    """Not needed by a worker that has one GPU to itself."""
    if "cupy" in machine.packages:
        return Finding("cupy", Level.OK, machine.packages["cupy"])
    return Finding("cupy", Level.NOTE, "not installed; only GPUs that talk to each other need it", INSTALL_CUDA)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _count(limit: int) -> str:
    return "unlimited" if limit < 0 else str(limit)
