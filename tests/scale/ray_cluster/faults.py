"""What clients see of faults: they read streams without a pause while something is killed, stopped or replaced."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from tests.scale.ray_cluster.clients import Answer, Clients, End, ask, counts, question
from tests.scale.ray_cluster.local import LocalCluster

REPLICAS = 3
CALM_SECONDS = 3.0  # before a fault, and after all is there again
LIMIT_SECONDS = 120.0
SLOW_SECONDS = 4.0
LONG_BODY_BYTES = 600_000  # the front passes on 262,144 to the router

Holds = Callable[[], bool]


@dataclass(frozen=True)
class Seen:
    """What clients saw of one fault."""

    fault: str
    answers: dict[str, int]
    bad_seconds: float  # from the fault until the last request was sent that went wrong; 0: only those under way did
    repaired_seconds: float | None  # from the fault until all is there again; None: nothing had to be, or not in time
    note: str
    details: list[str]  # of some that went wrong


def while_asked(cluster: LocalCluster, fault: str, happen: Callable[[], Holds], note: str = "") -> Seen:
    """Let something happen while clients read streams. `happen` returns what holds once all is there again."""
    clients = Clients(cluster.port)
    clients.start()
    time.sleep(CALM_SECONDS)
    at = time.monotonic()
    repaired = cluster.seconds_until(happen(), LIMIT_SECONDS)
    time.sleep(CALM_SECONDS)
    return seen(fault, clients.stop(), at, repaired, note)


def seen(fault: str, answers: list[Answer], at: float, repaired: float | None = None, note: str = "") -> Seen:
    bad = [answer for answer in answers if answer.end is not End.WHOLE]
    bad_seconds = max((answer.began - at for answer in bad), default=0.0)
    details = sorted({f"{answer.end}: {answer.detail}" for answer in bad})
    return Seen(fault, counts(answers), max(0.0, bad_seconds), repaired, note, details[:5])


def replica_killed(cluster: LocalCluster) -> Seen:
    def happen() -> Holds:
        name, port = busiest(cluster)
        cluster.kill(cluster.pid_of(port))
        return lambda: name not in cluster.replicas() and len(cluster.replicas()) == REPLICAS

    return while_asked(cluster, "replica killed", happen)


def long_bodies(cluster: LocalCluster) -> Seen:
    clients = Clients(cluster.port, number=4, body=question("long", 20) + b" " * LONG_BODY_BYTES)
    clients.start()
    at = time.monotonic()
    time.sleep(2 * CALM_SECONDS)
    return seen("body over the router's limit", clients.stop(), at)


def clients_leave(cluster: LocalCluster) -> Seen:
    """Clients leave after 0 to 40 ms, while they are routed or their prompts are computed."""

    async def leave() -> None:
        for number in range(200):
            await ask(cluster.port, question(f"leaves {number}", 1000), leave_after=number % 5 / 100)

    at, before = time.monotonic(), outcomes(cluster)
    asyncio.run(leave())
    emptied = cluster.seconds_until(lambda: num_running(cluster) == 0, 20)
    after = outcomes(cluster)
    new = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    note = "200 left; the replicas' accounts: " + ", ".join(f"{number:.0f} {name}" for name, number in new.items())
    return seen("client leaves while it is routed", [], at, emptied, note)


def busiest(cluster: LocalCluster) -> tuple[str, int]:
    """Return the name and the port of the replica with most requests: of an idle one, clients would see nothing."""
    return max(cluster.replicas().items(), key=lambda replica: running(metrics(replica[1])))


def metrics(port: int) -> str:
    """Return the page of /metrics of the replica at a port."""
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, trust_env=False).text


def running(page: str) -> float:
    """Return how many requests run, by a page of metrics."""
    return sum(float(value) for value in re.findall(r"^oaiserve_requests_running (\S+)", page, re.MULTILINE))


def outcomes(cluster: LocalCluster) -> dict[str, float]:
    """Return how many requests ended in which way, of all replicas."""
    found: dict[str, float] = {}
    for page in map(metrics, cluster.replicas().values()):
        pattern = r'^oaiserve_requests_total\{.*outcome="(\w+)".*\} (\S+)'
        for outcome, value in re.findall(pattern, page, re.MULTILINE):
            found[outcome] = found.get(outcome, 0) + float(value)
    return found


def num_running(cluster: LocalCluster) -> float:
    return sum(running(metrics(port)) for port in cluster.replicas().values())
