"""Measure the most that this client can do, against a server without a model, right before a run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from loadtest.arrivals import Arrivals
from loadtest.http_target import HttpOptions
from loadtest.prompts import Call, Workload
from loadtest.workers import Job, Workers

NUM_STREAMS = 32
NUM_EVENTS = 100
GAP_SECONDS = 0.01  # slow enough that events come one by one, as a model's do


@contextmanager
def null_server(*flags: str) -> Iterator[str]:
    """Run a null server in a process of its own, and yield its URL."""
    command = [sys.executable, "-m", "loadtest", "null-server", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def measure_ceiling(workers: Workers, num_processes: int) -> dict[str, float]:
    """Measure the client's CPU time for an event and for a request, and the rates that follow from these: what all
    processes together could do with a core each. This takes about 1.5 seconds."""
    with null_server("--gap-seconds", str(GAP_SECONDS)) as url:
        http = HttpOptions(url=url, model="null", processes=num_processes)
        users = Arrivals(concurrency=NUM_STREAMS * num_processes)

        def cpu_ns(calls: list[Call]) -> tuple[int, int]:
            job = Job(http, Workload(), users, calls, warmup=calls[: users.concurrency])
            samples, health = workers.run(job, lambda: None, lambda progress: None)
            failed = [sample.error for sample in samples if not sample.is_ok]
            if failed:
                raise RuntimeError(f"The client's ceiling could not be measured: {failed[0]}.")
            return sum(h.cpu_ns for h in health), sum(len(sample.event_ns) for sample in samples)

        num_requests = 4 * users.concurrency
        request_ns = cpu_ns([Call([1] * 128, 1)] * num_requests)[0] / num_requests
        streams = [Call([1] * 128, NUM_EVENTS)] * users.concurrency
        total_ns, num_events = cpu_ns(streams)
        event_ns = max(1.0, (total_ns - request_ns * len(streams)) / (num_events - len(streams)))
    return {
        "event_cpu_seconds": event_ns / 1e9,
        "request_cpu_seconds": request_ns / 1e9,
        "events_per_second": num_processes * 1e9 / event_ns,
        "requests_per_second": num_processes * 1e9 / request_ns,
    }
