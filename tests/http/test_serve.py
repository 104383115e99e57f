"""The life of a `slipring serve` process, with a scripted worker: start, drain, death, and what it says of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests import dev_shm
from tests.http.calls import HELLO, events

ROOT = Path(__file__).parents[2]
BODY = {"messages": HELLO, "stream": True, "ignore_eos": True, "max_tokens": 2000}


class Process:
    """A server on a free port; `script` is how its worker misbehaves."""

    def __init__(
        self, *flags: str, script: dict[str, Any] | None = None, port: int | None = None, before: tuple[str, ...] = ()
    ) -> None:
        """`before`: a command that becomes the server's."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        serve = [*before, sys.executable, "-m", "slipring.http.cli", "serve", "smollm2"]
        command = [*serve, "--port", str(self.port), *flags]
        self.popen = subprocess.Popen(
            [*command, "--worker-module", "tests.scripted_worker"],
            cwd=ROOT,
            env={**os.environ, "SCRIPT": json.dumps(script or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def worker(self) -> psutil.Process:
        (child,) = psutil.Process(self.popen.pid).children()
        return child

    def finish(self, timeout: float = 60) -> tuple[int, str, str]:
        out, err = self.popen.communicate(timeout=timeout)
        return self.popen.returncode, out, err


@contextlib.contextmanager
def started(*flags: str, script: dict[str, Any] | None = None, before: tuple[str, ...] = ()) -> Iterator[Process]:
    process = Process(*flags, script=script, before=before)
    try:
        asyncio.run(_ready(process))
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate()


async def _ready(process: Process) -> None:
    async with aiohttp.ClientSession() as client:
        for _ in range(2400):
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"{process.url}/health") as response:
                    if response.status == 200:
                        return
            assert process.popen.poll() is None, process.finish()
            await asyncio.sleep(0.05)
    raise AssertionError("never ready")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def stream(client: aiohttp.ClientSession, url: str, begun: asyncio.Event, body: dict[str, Any] = BODY) -> bytes:
    data = b""
    async with client.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        async for piece in response.content.iter_any():
            data += piece
            if data.count(b'"content"') > 2:
                begun.set()
    return data


async def health(client: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    async with client.get(f"{url}/health") as response:
        return response.status, await response.json()


def test_start_up_talks_and_a_signal_ends_it() -> None:
    with started() as process:
        process.popen.send_signal(signal.SIGTERM)
        status, out, err = process.finish()
    assert status == 0 and err == ""
    assert "Loading smollm2" in out and "tokenizer" in out
    assert f"http://127.0.0.1:{process.port}/v1" in out and "curl http://" in out


def test_the_banners_curl_line_works() -> None:
    with started("--api-key", "K'\"$x", "--served-model-name", "it's m") as process:
        process.popen.send_signal(signal.SIGINT)
        _, out, _ = process.finish()
    (line,) = [line.strip() for line in out.splitlines() if line.strip().startswith("curl")]
    assert "YOUR_KEY" in line and "K'" not in line
    with started("--served-model-name", "it's m", "--max-model-len", "64") as process:
        command = line.replace(f":{_port_of(line)}/", f":{process.port}/")
        answer = subprocess.run(["sh", "-c", command], capture_output=True, check=True, timeout=60)
    assert json.loads(answer.stdout)["model"] == "it's m"


def _port_of(line: str) -> str:
    return line.split("//", 1)[1].split("/", 1)[0].rsplit(":", 1)[1]


def test_503_and_starting_while_the_model_loads() -> None:
    async def probe(process: Process) -> None:
        async with aiohttp.ClientSession() as client:
            for _ in range(1200):
                with contextlib.suppress(aiohttp.ClientError):
                    assert await health(client, process.url) == (503, {"status": "starting", "reason": None})
                    break
                await asyncio.sleep(0.05)
            async with client.get(f"{process.url}/v1/models") as response:
                assert response.status == 503 and response.headers["Retry-After"]

    process = Process(script={"never_ready": True})
    try:
        asyncio.run(probe(process))
        process.popen.send_signal(signal.SIGINT)
        status, _, _ = process.finish()
        assert status == 128 + signal.SIGINT
    finally:
        process.popen.kill()


def test_a_taken_port_is_told_before_the_model_loads() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = Process(port=taken.getsockname()[1])
        status, out, err = process.finish()
    assert status == 1 and "--port" in err and "Traceback" not in err and "Loading" not in out


@pytest.mark.parametrize(
    ("flags", "script", "words"),
    [
        (("--max-model-len", "1000000"), {}, "--max-model-len"),
        (("--dtype", "float8"), {}, "--dtype"),
        ((), {"exit_at_start": 3}, "the scripted worker gives up"),
    ],
)
def test_what_cannot_start_names_the_fix(flags: tuple[str, ...], script: dict[str, Any], words: str) -> None:
    status, _, err = Process(*flags, script=script).finish()
    assert status == 1 and words in err and "Traceback" not in err


def test_a_missing_model_names_the_fix() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slipring.http.cli", "serve", "/no/such/model", "--port", "0"],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "/no/such/model" in done.stderr and "Traceback" not in done.stderr


def test_sigterm_lets_answers_finish_and_refuses_new_ones() -> None:
    async def main(process: Process) -> None:
        async with aiohttp.ClientSession() as client:
            begun = asyncio.Event()
            body = {**BODY, "max_tokens": 60}
            answer = asyncio.ensure_future(stream(client, process.url, begun, body))
            await asyncio.wait_for(begun.wait(), 60)
            process.popen.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            status, body = await health(client, process.url)
            assert status == 503 and body["status"] == "draining"
            async with client.post(f"{process.url}/v1/chat/completions", json=BODY) as response:
                assert response.status == 503 and response.headers["Retry-After"]
                assert (await response.json())["error"]["code"] == "engine_draining"
            found = events(await asyncio.wait_for(answer, 60))
            assert found[-1] == "[DONE]" and found[-2]["choices"][0]["finish_reason"] == "length"

    with started(script={"step_s": 0.02}) as process:
        asyncio.run(main(process))
        assert process.finish()[0] == 0


def test_answers_that_take_longer_than_the_shutdown_end_with_an_error() -> None:
    async def main(process: Process) -> None:
        async with aiohttp.ClientSession() as client:
            begun = asyncio.Event()
            answer = asyncio.ensure_future(stream(client, process.url, begun))
            await asyncio.wait_for(begun.wait(), 60)
            process.popen.send_signal(signal.SIGTERM)
            found = events(await asyncio.wait_for(answer, 60))
            assert "shutting down" in found[-1]["error"]["message"]

    with started("--shutdown-timeout", "0.3", script={"step_s": 0.02}) as process:
        asyncio.run(main(process))
        assert process.finish()[0] == 0


def test_a_second_ctrl_c_exits_at_once_and_takes_the_worker_along() -> None:
    async def main(process: Process) -> None:
        async with aiohttp.ClientSession() as client:
            begun = asyncio.Event()
            answer = asyncio.ensure_future(stream(client, process.url, begun))
            await asyncio.wait_for(begun.wait(), 60)
            process.popen.send_signal(signal.SIGINT)
            await asyncio.sleep(0.1)
            process.popen.send_signal(signal.SIGINT)
            with contextlib.suppress(aiohttp.ClientError):
                await asyncio.wait_for(answer, 60)

    with started(script={"step_s": 0.02}) as process:
        worker = process.worker()
        asyncio.run(main(process))
        assert process.finish(2)[0] == 130
        worker.wait(2)


def test_streams_outlive_a_killed_worker() -> None:
    async def main(process: Process) -> None:
        body = {**BODY, "max_tokens": 200, "seed": 5}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            undisturbed = events(await stream(client, process.url, asyncio.Event(), body))
            begun = [asyncio.Event() for _ in range(16)]
            answers = [asyncio.ensure_future(stream(client, process.url, event, body)) for event in begun]
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), 60)
            killed = time.monotonic()
            process.worker().kill()
            while (await health(client, process.url))[0] == 200:
                assert time.monotonic() - killed < 1
            status, body = await health(client, process.url)
            assert status == 200 or (body["status"] == "unhealthy" and "SIGKILL" in body["reason"])
            for data in await asyncio.wait_for(asyncio.gather(*answers), 60):
                found = events(data)
                assert found[-1] == "[DONE]" and text(found) == text(undisturbed)
            assert (await health(client, process.url))[0] == 200

    with started(script={"step_s": 0.01}) as process:
        asyncio.run(main(process))


def text(found: list[Any]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in found[:-1] if event["choices"])


def test_a_worker_that_dies_again_and_again_ends_the_server() -> None:
    async def main(process: Process) -> None:
        async with aiohttp.ClientSession() as client:
            begun = asyncio.Event()
            answers = [asyncio.ensure_future(stream(client, process.url, begun)) for _ in range(4)]
            await asyncio.wait_for(begun.wait(), 60)
            process.worker().kill()
            probed = asyncio.ensure_future(probe(client, process.url))
            for data in await asyncio.wait_for(asyncio.gather(*answers), 60):
                assert events(data)[-1]["error"]["message"]
            await asyncio.wait_for(probed, 60)

    async def probe(client: aiohttp.ClientSession, url: str) -> None:
        """While the streams end: a dead server stays for a moment only, and to read them all may take longer."""
        while (found := await health(client, url))[1]["status"] != "dead":
            await asyncio.sleep(0.05)
        status, body = found
        assert status == 503 and body["reason"]
        try:
            async with client.post(f"{url}/v1/chat/completions", json=BODY) as response:
                assert response.status == 503
        except aiohttp.ClientConnectionError:
            pass  # its streams are over, and it has gone since it said that it is dead

    with started(script={"exit_at_restart": 9, "step_s": 0.01}) as process:
        asyncio.run(main(process))
        status, _, err = process.finish()
    assert status == 1 and "Traceback" not in err
    assert "worker" in err and "exited with status 9" in err and "the scripted worker gives up" in err.splitlines()[-1]


def test_a_killed_server_leaves_no_worker_and_no_memory() -> None:
    before = dev_shm.names()
    for _ in range(2):
        with started() as process:
            worker = process.worker()
            mapped = Path(f"/proc/{worker.pid}/maps").read_text()
            assert "/dev/shm/slipring-" in mapped, "the two share memory"
            process.popen.kill()
            process.popen.wait(2)
            worker.wait(2)
    dev_shm.assert_nothing_new(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root")
def test_a_container_with_a_small_dev_shm_serves_all_the_same() -> None:
    mount = "mount -t tmpfs -o size=2m tmpfs /dev/shm && exec"
    if subprocess.run(["unshare", "--mount", "sh", "-c", f"{mount} true"], capture_output=True).returncode:
        pytest.skip("mount namespaces are not allowed here")
    with started(before=("unshare", "--mount", "sh", "-c", f'{mount} "$0" "$@"')) as process:
        body = json.dumps({"prompt": [1, 2, 3] * 500, "max_tokens": 20, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{process.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            assert json.loads(response.read())["usage"]["completion_tokens"] == 20
        process.popen.send_signal(signal.SIGTERM)
        status, out, err = process.finish()
    assert status == 0 and "--shm-size" in out + err


def test_descriptors_are_raised_to_the_hard_limit() -> None:
    with started() as process:
        soft, hard = psutil.Process(process.popen.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard


def test_one_life_on_a_unix_socket_with_an_access_log(tmp_path: Path) -> None:
    path = tmp_path / "slipring.sock"
    process = Process("--uds", str(path))

    async def main() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as client:
            for _ in range(2400):
                with contextlib.suppress(aiohttp.ClientError):
                    if (await health(client, "http://localhost"))[0] == 200:
                        break
                await asyncio.sleep(0.05)
            body = {**BODY, "stream": False, "max_tokens": 3}
            headers = {"x-request-id": "mine"}
            async with client.post("http://localhost/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200

    try:
        asyncio.run(main())
        process.popen.send_signal(signal.SIGTERM)
        status, out, _ = process.finish()
    finally:
        process.popen.kill()
    assert status == 0 and not path.exists()
    (line,) = [line for line in out.splitlines() if " 200 POST " in line]
    assert "/v1/chat/completions id=mine " in line and "+3 length" in line and " ttft=" in line
    assert f"curl --unix-socket {path} http://localhost/v1/chat/completions" in out
