"""Random clients leave nothing behind in a server, and each of their requests is accounted for."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import NamedTuple

import httpx

from loadtest.metrics_page import Labels, parse_metrics
from oaiserve.telemetry import names
from tests.e2e.random_clients import Clients
from tests.waiting import wait_until
from tools.server_process import running_oaiserve

# The KV cache is soon full, and clients do reach the limits.
FLAGS = (
    *("--dtype", "bfloat16", "--kv-cache-memory", "48MiB", "--max-running", "24", "--max-waiting", "16"),
    *("--write-timeout-seconds", "1", "--log-format", "json", "--log-level", "warning"),
)
NO_LABELS: Labels = frozenset()
SECONDS, NUM_CLIENTS = 5.0, 8


class Left(NamedTuple):
    """The state of a server by its page of metrics: nothing but the first two may grow by requests that have ended."""

    num_requests: int
    num_spans_under_way: int
    num_telemetry_errors: int
    num_in_engine: int
    num_blocks_used: int
    num_fds: int

    @classmethod
    def of(cls, url: str) -> Left:
        page = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).raise_for_status().text
        values = parse_metrics(page)

        def total(metric: names.Metric, **labels: str) -> int:
            found = (v for (name, of), v in values.items() if name == metric.name and of.issuperset(labels.items()))
            return int(sum(found))

        in_engine = (names.ENGINE[number] for number in ("num_running", "num_waiting", "num_tokenizing"))
        ended, *others = (total(names.SPANS, result=each) for each in ("ended", "exported", "failed", "dropped"))
        return cls(
            total(names.REQUESTS),
            ended - sum(others),
            total(names.TELEMETRY_ERRORS),
            sum(map(total, in_engine)),
            total(names.KV_BLOCKS, state="used"),
            int(values["process_open_fds", NO_LABELS]),
        )


def test_five_seconds_of_random_clients_leave_nothing_behind() -> None:
    # The clients need cores, too, and threads of one operation that wait for each other would take them.
    with running_oaiserve(*FLAGS, env=os.environ | {"OMP_NUM_THREADS": "1"}) as server:
        before, clients = Left.of(server.url), Clients(server.url, seed=1)
        asyncio.run(clients.run(NUM_CLIENTS, SECONDS))
        assert clients.problems == []
        expected = before._replace(num_requests=before.num_requests + clients.num_sent)

        def left() -> Left:
            found = Left.of(server.url)
            return found._replace(num_fds=max(found.num_fds, before.num_fds))  # fewer are fine

        with suppress(AssertionError):  # the next line says what is left
            wait_until(lambda: left() == expected)
        assert left() == expected
        assert server.terminate() == 0
        lines = server.log_file.read_text().splitlines()
        assert [line for line in lines if '"level": "WARNING"' not in line] == []
