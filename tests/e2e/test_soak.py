"""Random clients leave nothing behind in a server, and each of their requests is accounted for."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import httpx

from loadtest.metrics_page import parse_metrics
from oaiserve.telemetry import names
from tests.e2e.random_clients import Clients
from tests.waiting import wait_until
from tools.server_process import running_oaiserve

# The KV cache is soon full, and clients do reach the limits.
FLAGS = (
    *("--dtype", "bfloat16", "--kv-cache-memory", "48MiB", "--max-running", "24", "--max-waiting", "16"),
    *("--write-timeout-seconds", "1", "--log-format", "json", "--log-level", "warning"),
)
SECONDS, NUM_CLIENTS = 5.0, 8


def left(url: str) -> dict[str, int]:
    """Return what a page of metrics tells of requests: nothing but their number may grow by those that have ended."""
    page = parse_metrics(httpx.get(f"{url}/metrics", timeout=60, trust_env=False).raise_for_status().text)

    def total(metric: names.Metric, **labels: str) -> int:
        found = (v for (name, of), v in page.items() if name == metric.name and of.issuperset(labels.items()))
        return int(sum(found))

    spans = {result: total(names.SPANS, result=result) for result in ("ended", "exported", "failed", "dropped")}
    in_engine = (names.ENGINE[number] for number in ("num_running", "num_waiting", "num_tokenizing"))
    return {
        "requests": total(names.REQUESTS),
        "spans": 2 * spans["ended"] - sum(spans.values()),
        "errors": total(names.TELEMETRY_ERRORS),
        "in the engine": sum(map(total, in_engine)),
        "blocks": total(names.KV_BLOCKS, state="used"),
        "files": int(page["process_open_fds", frozenset()]),
    }


def test_five_seconds_of_random_clients_leave_nothing_behind() -> None:
    # The clients need cores, too, and threads of one operation that wait for each other would take them.
    with running_oaiserve(*FLAGS, env=os.environ | {"OMP_NUM_THREADS": "1"}) as server:
        before, clients = left(server.url), Clients(server.url, seed=1)
        asyncio.run(clients.run(NUM_CLIENTS, SECONDS))
        assert clients.problems == []
        expected = before | {"requests": before["requests"] + clients.num_sent}

        def now() -> dict[str, int]:
            found = left(server.url)
            return found | {"files": max(found["files"], before["files"])}  # fewer are fine

        with suppress(AssertionError):  # the next line says what is left
            wait_until(lambda: now() == expected)
        assert now() == expected
        assert server.terminate() == 0
        lines = server.log_file.read_text().splitlines()
        assert [line for line in lines if '"level": "WARNING"' not in line] == []
