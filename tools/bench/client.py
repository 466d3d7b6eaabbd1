"""Runs a workload on a server, whichever it is, with this project's load test."""

from __future__ import annotations

import time
from typing import Any

from tools.bench.process_usage import cpu_seconds, machine_cpu_seconds
from tools.bench.workloads import Workload
from tools.load import run_bench
from tools.server_process import ServerProcess

# The share of a run's requests that may be missing. Some servers drop a connection now and then; the rates count only
# what came, and the table shows how much is missing.
MOST_MISSING = 0.25


def run(server: ServerProcess, workload: Workload, seed: int) -> dict[str, Any]:
    """Return the figures of one run, in ms where a key says so. Raises RunFailed."""
    began = time.monotonic()
    others_before = others_seconds(server)
    # Some servers close a connection right after an answer, when the next request is on its way.
    flags = ("--no-stop-on-eos", "--header", "connection: close")
    point = run_bench(server.url, options(workload, seed), *flags, most_failed=MOST_MISSING)
    other_cores = (others_seconds(server) - others_before) / (time.monotonic() - began)
    (only_run,) = point["runs"]
    client_cores = sum(process["cpu_share"] for process in only_run["client"]["processes"])
    used = {"other_cores": round(other_cores - client_cores, 3), "client": point["verdict"]}  # on average
    return figures(only_run["metrics"], workload) | used


def others_seconds(server: ServerProcess) -> float:
    """Return the CPU time of all that is not the server."""
    return machine_cpu_seconds() - cpu_seconds(server.process.pid)


def options(workload: Workload, seed: int) -> dict[str, Any]:
    """Return the flags of the load test. Prompts are words of about a token each, which every server takes."""
    flags = {
        "--num-requests": workload.num_requests,
        "--random-form": "words",
        "--input-len": workload.input_len,
        "--prefix-len": workload.prefix_len,
        "--max-new-tokens": workload.output_len,
        "--seed": seed,
        "--warmup": 0,
    }
    if workload.rate is None:
        return flags | {"--concurrency": workload.concurrency}
    return flags | {"--arrival": "poisson", "--rate": workload.rate}


def figures(metrics: dict[str, Any], workload: Workload) -> dict[str, Any]:
    """Return the figures of the load test's metrics by the keys of `MEASURES`."""
    wanted_tokens = workload.num_requests * workload.output_len
    values: dict[str, Any] = {
        "seconds": round(metrics["window_seconds"], 3),
        "missing_requests": workload.num_requests - metrics["num_ok"],
        "missing_tokens": wanted_tokens - metrics["completion_tokens"],
        "output_throughput": round(metrics["completion_tokens_per_second"], 2),
        "total_throughput": round(metrics["total_tokens_per_second"], 2),
    }
    for kind in ("ttft", "tpot", "itl", "latency"):
        if (distribution := metrics["distributions"][kind]) is not None:
            values |= {f"{kind}_{share}_ms": round(distribution[share] * 1e3, 2) for share in ("p50", "p99")}
    return values
