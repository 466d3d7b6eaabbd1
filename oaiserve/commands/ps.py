"""The command `oaiserve ps`."""

from __future__ import annotations

import re
import sys
from datetime import datetime

from oaiserve.commands.client import Client, NoAnswer
from oaiserve.commands.servers import running
from oaiserve.commands.table import size, table


def command() -> int:
    """List your servers on this machine, newest first, with the requests that run and wait there."""
    servers = running()
    if not servers:
        print("No server is running here. To start one: oaiserve serve demo")
        return 0
    rows = []
    problems = []
    for server in servers:
        since = f"{datetime.fromtimestamp(server.since):%Y-%m-%d %H:%M}"
        load = "no answer", "-", "-"
        try:
            load = _load(Client(server.url).text("/metrics"))
        except NoAnswer as error:
            problems.append(str(error))
        rows.append((server.url, server.model, since, *load, str(server.pid)))
    print(table(("ADDRESS", "MODEL", "SINCE", "RUNNING", "WAITING", "MEMORY", "PID"), rows))
    for problem in problems:
        print(f"oaiserve ps: {problem}", file=sys.stderr)
    return 0


def _load(metrics: str) -> tuple[str, str, str]:
    """Return the running and the waiting requests, and the memory of the server and its models."""
    values: dict[str, float] = {}  # With several models, these are sums over them.
    for name, value in re.findall(r'^(\w+)(?:\{served_model="[^"]*"\})? (\S+)$', metrics, re.MULTILINE):
        values[name] = values.get(name, 0.0) + float(value)
    running, waiting = (values.get(f"oaiserve_requests_{state}") for state in ("running", "waiting"))
    memory = values.get("process_resident_memory_bytes")
    if memory is not None:
        memory += values.get("oaiserve_model_memory_bytes", 0.0)
    return _count(running), _count(waiting), "-" if memory is None else size(memory)


def _count(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:.0f}"
