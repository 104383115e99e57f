"""What an idle server costs: CPU of engine and worker over ten seconds."""

from __future__ import annotations

import time

from perf.figure import Measurement, Options
from perf.serving import free_port, serving

DESCRIPTION = "CPU of an idle server with the real model, engine and worker together, in percent of a core"


def measure(options: Options) -> Measurement:
    seconds = 3 if options.quick else 10
    port = free_port()
    with serving(["-m", "slipring.http.cli", "serve", "smollm2", "--port", str(port)], port) as server:
        processes = [server.stats, *server.stats.children()]
        time.sleep(2)
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(seconds)
        used = [sum(process.cpu_times()[:2]) - start for process, start in zip(processes, before, strict=True)]
        assert server.healthy()
    percent = [round(100 * cpu / seconds, 3) for cpu in used]
    row = {"engine_percent": percent[0], "worker_percent": percent[1], "seconds": seconds}
    return Measurement({"cpu_percent": round(sum(percent), 3)}, [row])
