"""Measures streams over HTTP, as the processes of the load test read them, and the CPU time of the server's threads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from loadtest.metrics_page import parse_metrics
from tools.gpu.sections import Target
from tools.gpu.workload import files_of, note_off
from tools.load import run_bench
from tools.server_process import running_oaiserve

MODEL = "llama-3.2-1b"
FEATURE = "oaiserve_engine_feature"
PROMPT = {"--random-form": "words", "--input-len": 3}
KV_MEMORY = "6GiB"  # other sections hold models on the device, too
LEAST_SECONDS = 0.05  # CPU time of a thread that is listed


def run(target: Target) -> Iterator[dict[str, Any]]:
    if target.is_dry:  # A server has no fake device.
        target = Target(torch.device("cpu"), quick=True, turns=target.turns)
    count, num_tokens, clients = (4, 8, 1) if target.quick else (256, 192, 8)
    flags = ["--device", target.device.type, "--max-running", str(count)]
    flags += ["--max-connections-per-address", "0", "--log-level", "warning"]
    if target.is_gpu:
        flags += ["--kv-cache-memory", KV_MEMORY, "--gpu-memory-utilization", "0.97"]
    load = PROMPT | {"--num-requests": count, "--concurrency": count, "--max-new-tokens": num_tokens}
    with ExitStack() as stack:
        files = stack.enter_context(files_of(MODEL, target))
        log_file = Path(files.folder) / "log"
        with target.starting():
            running = running_oaiserve(*flags, model=files.folder, log_file=log_file, start_limit_seconds=140.0)
            server = stack.enter_context(running)
        yield {"streams": count, "tokens_each": num_tokens, "start_seconds": server.start_seconds}
        with target.turn():
            run_bench(server.url, load | {"--processes": clients, "--warmup": 0}, "--no-stop-on-eos")
            before = thread_seconds(server.process.pid)
            began = time.monotonic()
            point = run_bench(server.url, load | {"--processes": clients, "--warmup": 0}, "--no-stop-on-eos")
            seconds = time.monotonic() - began
            after = thread_seconds(server.process.pid)
        if target.is_gpu:
            page = parse_metrics(httpx.get(f"{server.url}/metrics", timeout=30).text)
            is_on = {dict(labels)["feature"]: on for (name, labels), on in page.items() if name == FEATURE}
            note_off({name: "" if on else "of the server" for name, on in is_on.items()})
    metrics = point["runs"][0]["metrics"]
    num_generated = metrics["completion_tokens"]
    threads = spent(before, after)
    yield {
        "output_tokens_per_second": metrics["completion_tokens_per_second"],
        **{
            f"{kind}_{share}_ms": 1e3 * times[share]
            for kind in ("ttft", "itl")
            if (times := metrics["distributions"][kind]) is not None
            for share in ("p50", "p99")
        },
        "client": point["verdict"],
        "seconds": seconds,
        "threads": [
            {"thread": name, "cpu_seconds": used, "us_per_token": 1e6 * used / max(1, num_generated)}
            for name, used in threads
        ],
    }


def thread_seconds(pid: int) -> dict[str, float]:
    """Return the CPU time of each thread of a process, and of its child processes. The first thread of each, which is
    the server's event loop, is called so."""
    ticks = os.sysconf("SC_CLK_TCK")
    found: dict[str, float] = {}
    for each in (pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))):
        for task in Path(f"/proc/{each}/task").glob("*"):
            try:
                head, _, rest = (task / "stat").read_text().rpartition(")")
            except OSError:  # it has ended
                continue
            fields = rest.split()  # from the third field on
            name = "first" if task.name == f"{each}" else head.partition("(")[2]
            found[f"{name} {task.name}"] = (int(fields[11]) + int(fields[12])) / ticks
    return found


def spent(before: dict[str, float], after: dict[str, float]) -> list[tuple[str, float]]:
    """Return the threads that used CPU time between two readings, the busiest first."""
    used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    return sorted(((thread, one) for thread, one in used.items() if one >= LEAST_SECONDS), key=lambda one: -one[1])
