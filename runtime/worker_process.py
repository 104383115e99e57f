"""One worker process: spawned from the loop's own thread, its death watched, its output always drained.

Death is seen twice: by the life lock when the kernel begins to clear the process away, by pidfd when it has.

A worker must never outlive the engine: it asks for PR_SET_PDEATHSIG, which fires when the *thread* that made it
ends (hence: spawn only from the loop's thread), and it also watches a lifeline pipe whose other end lives here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping

from slipring.shm import spec as wire_spec
from slipring.shm.life_lock import LifeLock, exit_status
from slipring.shm.segment import memfd
from slipring.shm.spec import WorkerConfig

_LAST_LINES = 40
_REAP_S = 5.0
_CAUSES = {
    "SIGKILL": "out of memory? the kernel's log says more",
    "SIGILL": "an instruction that this CPU lacks: was a library built for another one?",
    "SIGSEGV": "a bug in a native library or a driver",
    "SIGBUS": "shared memory or a file that was cut short, or broken memory",
    "SIGABRT": "a native library gave up; its words are in the lines below",
    "SIGFPE": "a bug in a native library",
}
"""Signal -> what most often lies behind it."""


class WorkerProcess:
    def __init__(self, on_death: Callable[[int], None], on_reaped: Callable[[], None], echo: bool = True) -> None:
        """Both are called once, on the loop: `on_death(status)` when the process is lost, `on_reaped` when it is gone
        and nothing of it writes any more. What it wrote last is complete by then."""
        self._on_death: Callable[[int], None] | None = on_death
        self._on_reaped = on_reaped
        self._echo = echo
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._output_fd = -1
        self._lifeline = -1
        self._partial = b""
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        """What the worker last wrote to stdout or stderr."""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else -1

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def spawn(
        self,
        module: str,
        make_config: Callable[[int], WorkerConfig],
        inherit: tuple[int, ...],
        environment: Mapping[str, str],
        cpus: tuple[int, ...] = (),
    ) -> None:
        """Start `python -m module FD`. `make_config` gets the lifeline's descriptor as the child will see it.

        `cpus`: those that it may run on; none: any.

        Raises OSError when there is no room for a process or its descriptors; then nothing is left of it.
        """
        try:
            self._start(module, make_config, inherit, environment)
            assert self._process is not None
            if cpus:
                # It is a single thread yet, in its dynamic linker: whatever it becomes inherits this.
                os.sched_setaffinity(self._process.pid, cpus)
            self._pidfd = os.pidfd_open(self._process.pid)
            os.set_blocking(self._output_fd, False)
            loop = asyncio.get_running_loop()
            loop.add_reader(self._pidfd, self._reap)
            loop.add_reader(self._output_fd, self._drain)
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        module: str,
        make_config: Callable[[int], WorkerConfig],
        inherit: tuple[int, ...],
        environment: Mapping[str, str],
    ) -> None:
        with contextlib.ExitStack() as ours:
            lifeline_read, self._lifeline = os.pipe()
            ours.callback(os.close, lifeline_read)
            self._output_fd, output_write = os.pipe()
            ours.callback(os.close, output_write)
            config_fd = _readable(wire_spec.encode(make_config(lifeline_read)))
            ours.callback(os.close, config_fd)
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(config_fd)],
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                pass_fds=(*inherit, config_fd, lifeline_read),
                env=dict(environment),
            )

    def watch(self, lock: LifeLock) -> None:
        """See its death sooner. The process holds `lock`."""
        loop = asyncio.get_running_loop()

        def on_death() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._see_death)

        lock.watch(on_death)

    def kill(self) -> None:
        """SIGKILL; the process is ours until it is reaped, so its pid cannot be somebody else's."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def close(self) -> None:
        """Kill and reap without telling anybody, or leave what cannot be reaped to the kernel. Idempotent."""
        if self._process is not None:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
        self._release()
        # Whom it told holds it: a cycle would keep the epoch's memory mapped until the collector runs.
        self._on_death, self._on_reaped = None, lambda: None

    def describe_exit(self, status: int) -> str:
        """The exit in words, with the hint that people need most often."""
        if status >= 0:
            return f"exited with status {status}"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return f"was killed by {name}" + (f" ({cause})" if (cause := _CAUSES.get(name)) else "")

    def _see_death(self) -> None:
        if self.alive and (status := exit_status(self.pid)) is not None:
            self._tell_death(status)

    def _tell_death(self, status: int) -> None:
        tell, self._on_death = self._on_death, None
        if tell is not None:
            tell(status)

    def _reap(self) -> None:
        assert self._process is not None
        status = self._process.wait()
        self._drain()
        if self._partial:
            self._take_line(self._partial.decode("utf-8", "replace"))
        self._release()
        self._tell_death(status)
        self._on_reaped()

    def _release(self) -> None:
        loop = asyncio.get_event_loop()
        for fd in (self._pidfd, self._output_fd):
            if fd >= 0:
                loop.remove_reader(fd)
        for fd in (self._pidfd, self._output_fd, self._lifeline):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._output_fd = self._lifeline = -1

    def _drain(self) -> None:
        while True:
            try:
                data = os.read(self._output_fd, 65536)
            except BlockingIOError:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self._output_fd)
                return
            *lines, self._partial = (self._partial + data).split(b"\n")
            self._partial = self._partial[-4096:]
            for line in lines:
                self._take_line(line.decode("utf-8", "replace"))

    def _take_line(self, line: str) -> None:
        self.last_lines.append(line)
        if self._echo:
            print(f"[worker] {line}", file=sys.stderr, flush=True)


def _readable(data: bytes) -> int:
    """A descriptor from which `data` can be read to its end."""
    fd = memfd("worker-config", len(data))
    os.pwrite(fd, data, 0)
    return fd
