"""What this machine has, read from the kernel, the driver's files and the installed packages; torch is never imported.

`inspect_machine` collects `Machine`; what it means for serving is decided in `doctor.py`. Everything is optional: a
file or library that is missing leaves its field empty, and nothing here raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import platform
import re
import resource
import shutil
import subprocess
from pathlib import Path

import msgspec

from slipring.runtime.config import available_cpus
from slipring.runtime.cpu_features import cpu_features
from slipring.shm.memory import available_bytes

_NVIDIA, _AMD = "0x10de", "0x1002"
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x1200")
"""PCI classes: VGA controller, 3D controller, accelerator."""


class Gpu(msgspec.Struct, frozen=True):
    name: str
    memory_bytes: int
    compute_capability: str
    """Such as `9.0`."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    python: str = ""
    architecture: str = ""
    cpu: str = ""
    cpus: int = 1
    """Those that this process may run on."""
    cpu_quota: float | None = None
    """The container's limit, in CPUs."""
    cpu_features: tuple[str, ...] = ()
    memory_bytes: int = 0
    available_bytes: int = 0
    """Free to us: the host's, or what the container's limit leaves."""
    shm_bytes: int = 0
    """Size of /dev/shm; 0 where there is none."""
    shm_free_bytes: int = 0
    open_files: tuple[int, int] = (0, 0)
    """RLIMIT_NOFILE, soft and hard; -1 is unlimited."""
    huge_pages: str = ""
    """Transparent huge pages: always, madvise or never."""
    nvidia_devices: int = 0
    """On the PCI bus, whether they can be used or not."""
    amd_devices: int = 0
    driver: str = ""
    driver_cuda: str = ""
    """The newest CUDA that the driver runs, such as `13.0`."""
    gpus: tuple[Gpu, ...] = ()
    toolkit: str = ""
    """Version of the CUDA toolkit (nvcc), which serving does not need."""
    packages: dict[str, str] = msgspec.field(default_factory=dict)
    """Installed version of torch, triton and cupy; those that are missing are not listed."""
    torch_has_cuda: bool = False
    missing: tuple[str, ...] = ()
    """Of slipring's own dependencies."""


def inspect_machine(root: Path = Path("/")) -> Machine:
    """`root` is where /proc, /sys and /dev lie (tests put made-up ones there)."""
    cpuinfo, shm = _read(root / "proc/cpuinfo"), _shm(root / "dev/shm")
    driver, driver_cuda, gpus = _nvml() or (_driver_file(root), "", ())
    return Machine(
        python=platform.python_version(),
        architecture=platform.machine(),
        cpu=_first(r"^model name\s*: (.+)$", cpuinfo),
        cpus=available_cpus(),
        cpu_quota=_cpu_quota(root),
        cpu_features=cpu_features(root),
        memory_bytes=int(_first(r"^MemTotal:\s+(\d+)", _read(root / "proc/meminfo")) or 0) * 1024,
        available_bytes=_available(root),
        shm_bytes=shm[0],
        shm_free_bytes=shm[1],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        huge_pages=_first(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        nvidia_devices=_pci_devices(root, _NVIDIA),
        amd_devices=_pci_devices(root, _AMD),
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=gpus,
        toolkit=_toolkit(),
        packages=_packages(),
        torch_has_cuda=_torch_has_cuda(),
        missing=_missing(),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else ""


def _available(root: Path) -> int:
    with contextlib.suppress(OSError):
        return available_bytes(root)
    return 0


def _cpu_quota(root: Path) -> float | None:
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota, period = (_read(root / f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    with contextlib.suppress(ValueError, ZeroDivisionError):
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _shm(path: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(path)
        return usage.total, usage.free
    return 0, 0


def _pci_devices(root: Path, vendor: str) -> int:
    devices = (root / "sys/bus/pci/devices").glob("*")
    return sum(
        _read(device / "vendor").strip() == vendor and _read(device / "class").startswith(_DISPLAY_CLASSES)
        for device in devices
    )


def _driver_file(root: Path) -> str:
    """The kernel module's version, which is there even where a container lacks the driver's libraries."""
    return _first(r"Kernel Module(?: for \S+)?\s+([\d.]+)", _read(root / "proc/driver/nvidia/version"))


def _nvml() -> tuple[str, str, tuple[Gpu, ...]] | None:
    """(driver, its CUDA, GPUs) from the driver's management library, or None where it cannot be asked."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return None
        try:
            return _nvml_text(nvml, "nvmlSystemGetDriverVersion"), _nvml_cuda(nvml), _nvml_gpus(nvml)
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None


def _nvml_text(nvml: ctypes.CDLL, function: str, *arguments: object) -> str:
    buffer = ctypes.create_string_buffer(96)
    failed = getattr(nvml, function)(*arguments, buffer, ctypes.c_uint(len(buffer)))
    return "" if failed else buffer.value.decode(errors="replace")


def _nvml_cuda(nvml: ctypes.CDLL) -> str:
    number = ctypes.c_int()
    if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _nvml_gpus(nvml: ctypes.CDLL) -> tuple[Gpu, ...]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return ()
    return tuple(_nvml_gpu(nvml, index) for index in range(count.value))


def _nvml_gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    device, memory = ctypes.c_void_p(), _NvmlMemory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
    nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(_nvml_text(nvml, "nvmlDeviceGetName", device), memory.total, f"{major.value}.{minor.value}")


def _toolkit() -> str:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=5).stdout
        return _first(r"release ([\d.]+)", said)
    return ""


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for name, distributions in (
        ("torch", ("torch",)),
        ("triton", ("triton",)),
        ("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy")),
    ):
        for distribution in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found.setdefault(name, importlib.metadata.version(distribution))
    return found


def _torch_has_cuda() -> bool:
    """By the library that a CUDA build brings; the version's suffix (+cpu, +cu130) is not on every index's wheels."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        wheel = importlib.metadata.distribution("torch")
        return Path(str(wheel.locate_file("torch/lib/libtorch_cuda.so"))).exists()
    return False


def _missing() -> tuple[str, ...]:
    try:
        needed = importlib.metadata.requires("slipring") or []
    except importlib.metadata.PackageNotFoundError:
        return ("slipring",)
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needed if "extra ==" not in line]
    return tuple(name for name in names if not _installed(name))


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
