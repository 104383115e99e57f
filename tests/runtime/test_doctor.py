"""`slipring doctor`: what it reads of a made-up machine, what it makes of it, and that it runs on this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from slipring.http.doctor import report
from slipring.kernels.spec import ARCHITECTURES
from slipring.runtime.doctor import GPU_GENERATIONS, INSTALL_CUDA, Diagnosis, Level, diagnose
from slipring.runtime.machine import Gpu, Machine, inspect_machine

ROOT = Path(__file__).parents[2]
H200 = Gpu("NVIDIA H200", 139 << 30, "9.0")
SERVER = Machine(
    python="3.12.3", architecture="x86_64", cpu="Xeon", cpus=16, cpu_features=("avx2", "amx_bf16", "avx512f"),
    memory_bytes=128 << 30, available_bytes=100 << 30, shm_bytes=64 << 30, shm_free_bytes=60 << 30,
    open_files=(65536, -1), huge_pages="madvise", nvidia_devices=1, driver="580.65.06", driver_cuda="13.0",
    gpus=(H200,), packages={"torch": "2.11.0+cu130", "triton": "3.6.0", "cupy": "14.2.0"}, torch_has_cuda=True,
)  # fmt: skip


def changed(device: str = "cpu", **fields) -> Diagnosis:
    return diagnose(msgspec.structs.replace(SERVER, **fields), device)


def test_a_gpu_server_with_everything_has_nothing_to_mend() -> None:
    diagnosis = diagnose(SERVER)
    assert diagnosis.can_serve and diagnosis.cuda
    assert {finding.level for finding in diagnosis.findings} == {Level.OK}
    assert "0: NVIDIA H200, 139.0 GiB, compute capability 9.0" in report(diagnosis)
    assert "run on the CPU. A GPU is ready too: --device cuda:N uses it." in report(diagnosis), "auto is the CPU"


@pytest.mark.parametrize(
    ("fields", "subject", "fix"),
    [
        ({"torch_has_cuda": False}, "torch", "pip install --force-reinstall torch"),
        ({"packages": {"torch": "2.11.0+cu130", "cupy": "14.2.0"}}, "triton", INSTALL_CUDA),
        ({"driver_cuda": "12.8"}, "driver", "580"),
        ({"gpus": (Gpu("Tesla T4", 15 << 30, "7.5"),)}, "GPU", "another GPU"),
        ({"gpus": (Gpu("NVIDIA A100", 80 << 30, "8.0"),)}, "GPU", "another GPU"),
        ({"gpus": ()}, "GPU", "docker run --gpus all"),
        ({"gpus": (), "driver": ""}, "GPU", "install the NVIDIA driver"),
    ],
)
def test_a_gpu_that_cannot_be_used_names_the_fix_and_the_cpu_serves(fields: dict, subject: str, fix: str) -> None:
    diagnosis = changed(**fields)
    assert diagnosis.can_serve and not diagnosis.cuda
    (advice,) = (finding for finding in diagnosis.findings if finding.level is Level.ADVICE)
    assert advice.subject == subject and fix in advice.fix
    asked_for = changed("cuda:0", **fields)
    assert not asked_for.can_serve and not asked_for.cuda, "what is advice for the CPU keeps a GPU from serving"
    (problem,) = (finding for finding in asked_for.findings if finding.level is Level.PROBLEM)
    assert (problem.subject, problem.fix) == (subject, advice.fix)
    assert "cannot serve with --device cuda:0" in report(asked_for)


def test_the_verdict_is_of_the_device_asked_for() -> None:
    gpus = (H200, Gpu("Tesla T4", 15 << 30, "7.5"))
    good = changed("cuda:0", gpus=gpus)
    assert good.can_serve and good.cuda and "run on the GPU with --device cuda:0" in report(good)
    assert not changed("cuda:1", gpus=gpus).can_serve
    assert changed(gpus=gpus).cuda, "one of them can be used"
    absent = changed("cuda:2", gpus=gpus)
    assert not absent.can_serve and not absent.cuda and "no cuda:2, the last one is cuda:1" in report(absent)
    none = changed("cuda:0", gpus=(), driver="", nvidia_devices=0)
    assert not none.can_serve and "none, so no cuda:0" in report(none)


def test_one_gpu_needs_no_cupy() -> None:
    diagnosis = changed("cuda:0", packages={"torch": "2.11.0+cu130", "triton": "3.6.0"})
    assert diagnosis.can_serve and diagnosis.cuda
    (note,) = (finding for finding in diagnosis.findings if finding.subject == "cupy")
    assert note.level is Level.NOTE and note.fix == INSTALL_CUDA


def test_supported_generations_are_those_that_kernels_are_checked_for() -> None:
    assert {f"sm_{major}0" for major in GPU_GENERATIONS} == {name for name in ARCHITECTURES if name.startswith("sm_")}


@pytest.mark.parametrize(
    ("fields", "level", "fix"),
    [
        ({"open_files": (1024, 4096)}, Level.ADVICE, "ulimit -n 4096"),
        ({"open_files": (1024, -1)}, Level.ADVICE, "ulimit -n 65536"),
        ({"huge_pages": "never"}, Level.ADVICE, "transparent_hugepage"),
        ({"available_bytes": 100 << 20}, Level.ADVICE, "--memory"),
        ({"cpu_quota": 2.5}, Level.ADVICE, "--cpu-threads 2"),
        ({"shm_free_bytes": 64 << 20}, Level.NOTE, "--shm-size"),
        ({"missing": ("aiohttp",)}, Level.PROBLEM, "pip install"),
    ],
)
def test_limits_name_the_fix(fields: dict, level: Level, fix: str) -> None:
    diagnosis = changed(**fields)
    (found,) = (finding for finding in diagnosis.findings if finding.level is not Level.OK)
    assert found.level is level and fix in found.fix
    assert diagnosis.can_serve == (level is not Level.PROBLEM)


def test_without_a_gpu_nothing_is_wrong() -> None:
    diagnosis = changed(gpus=(), driver="", driver_cuda="", nvidia_devices=0, torch_has_cuda=False)
    assert diagnosis.can_serve and not diagnosis.cuda
    assert Level.ADVICE not in {finding.level for finding in diagnosis.findings}
    assert "will run on the CPU" in report(diagnosis)


def test_every_file_is_read(tmp_path: Path) -> None:
    device = "sys/bus/pci/devices/0000:01:00.0"
    for name, text in {
        "proc/cpuinfo": "model name\t: AMD EPYC 9654\nflags\t\t: fpu avx2 avx512f avx512_bf16\n",
        "proc/meminfo": "MemTotal:       1000 kB\nMemAvailable:    500 kB\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        f"{device}/vendor": "0x10de\n",
        f"{device}/class": "0x030200\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = inspect_machine(tmp_path)
    assert (machine.cpu, machine.cpu_features) == ("AMD EPYC 9654", ("avx2", "avx512_bf16", "avx512f", "fpu"))
    assert (machine.memory_bytes, machine.available_bytes) == (1000 << 10, 500 << 10)
    assert (machine.cpu_quota, machine.huge_pages, machine.nvidia_devices) == (1.5, "madvise", 1)
    assert machine.shm_bytes == 0
    if not machine.gpus:  # this machine has no NVML, so the file is the source
        assert machine.driver == "580.65.06"


def test_an_empty_root_raises_nothing(tmp_path: Path) -> None:
    machine = inspect_machine(tmp_path)
    assert (machine.cpu, machine.available_bytes, machine.cpu_quota) == ("", 0, None)
    assert machine.packages["torch"] and not machine.missing


def test_the_command_runs_here_without_torch() -> None:
    code = "import sys; sys.argv = ['slipring', 'doctor', '--json']; import atexit\n"
    code += "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
    code += "from slipring.http.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "False\n", done.stderr
    answer = json.loads(done.stdout)
    assert answer["device"] == "cpu" and answer["can_serve"]
    assert {"GPU", "CPU", "memory"} <= {found["subject"] for found in answer["findings"]}


@pytest.mark.parametrize(("device", "status"), [("cuda:99", 1), ("tpu", 2)])
def test_the_command_is_told_the_device(device: str, status: int) -> None:
    command = [sys.executable, "-m", "slipring.http.cli", "doctor", "--device", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status and (f"--device {device}" in done.stdout or "must be auto, cpu" in done.stderr)
