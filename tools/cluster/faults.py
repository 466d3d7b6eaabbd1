"""What clients see of faults: they read streams without a pause while something is killed, stopped or replaced."""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import httpx

from tools.cluster.clients import Answer, Clients, End, ask, counts, question
from tools.cluster.local import LocalCluster, start_local
from tools.markdown import as_markdown

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


def router_killed(cluster: LocalCluster) -> Seen:
    def happen() -> Holds:
        before = cluster.processes("ray::ServeReplica:oaiserve:router")
        for pid in before:
            cluster.kill(pid)
        return lambda: bool(set(cluster.processes("ray::ServeReplica:oaiserve:router")) - set(before))

    return while_asked(cluster, "router killed", happen, "requests go by connections meanwhile")


def front_killed(cluster: LocalCluster) -> Seen:
    def happen() -> Holds:
        before = cluster.fronts()
        for pid in before:
            cluster.kill(pid)
        return lambda: bool(set(cluster.fronts()) - set(before)) and cluster.answers()

    return while_asked(cluster, "front killed", happen, "where there are several nodes, there are other fronts")


def controller_killed(cluster: LocalCluster) -> Seen:
    def happen() -> Holds:
        before = cluster.processes("ray::ServeController")
        for pid in before:
            cluster.kill(pid)
        return lambda: (
            bool(set(cluster.processes("ray::ServeController")) - set(before)) and len(cluster.replicas()) == REPLICAS
        )

    return while_asked(cluster, "controller killed", happen)


def rolling_update(cluster: LocalCluster) -> Seen:
    def happen() -> Holds:
        before = cluster.replicas().keys()
        cluster.deploy(REPLICAS, step_ms=11)
        return lambda: len(now := cluster.replicas().keys()) == REPLICAS and not before & now

    return while_asked(cluster, "rolling update", happen)


def failed_update(cluster: LocalCluster) -> Seen:
    """An update has a setting that is wrong, so the application cannot be built; then one comes without it."""

    def happen() -> Holds:
        cluster.deploy(REPLICAS, step_ms=11, max_running="many")
        return lambda: cluster.status() == "DEPLOY_FAILED" and cluster.answers()

    found = while_asked(cluster, "update with a wrong setting", happen, "until Ray says that it failed")
    cluster.deploy(REPLICAS, step_ms=11)
    return found


def scaled_down(cluster: LocalCluster) -> Seen:
    def happen() -> Holds:
        cluster.deploy(REPLICAS - 1, step_ms=11)
        return lambda: len(cluster.processes("ray::ServeReplica:oaiserve:replica")) == REPLICAS - 1

    return while_asked(cluster, "scaled down", happen)


def scaled_up(cluster: LocalCluster) -> Seen:
    def happen() -> Holds:
        cluster.deploy(REPLICAS, step_ms=11)
        return lambda: len(cluster.replicas()) == REPLICAS

    return while_asked(cluster, "scaled up", happen)


def slow_replica(cluster: LocalCluster) -> Seen:
    def happen() -> Holds:
        pid = cluster.pid_of(busiest(cluster)[1])
        cluster.kill(pid, signal.SIGSTOP)
        time.sleep(SLOW_SECONDS)
        cluster.kill(pid, signal.SIGCONT)
        return lambda: len(cluster.replicas()) == REPLICAS and cluster.answers()

    return while_asked(cluster, f"replica stopped for {SLOW_SECONDS:.0f} s", happen)


def without_a_port(cluster: LocalCluster) -> Seen:
    """A node without the front's settings joins, and gets the replicas that have no other place: they open no port."""

    bare = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
    nodes = []

    def happen() -> Holds:
        nodes.append(cluster.add_node(4, env_vars=bare))
        cluster.deploy(REPLICAS + 2, step_ms=11)
        return lambda: cluster.num_running() == REPLICAS + 2 and cluster.answers()

    found = while_asked(cluster, "replica without an open port", happen)
    num_bare = cluster.num_running() - len(cluster.replicas())
    found = replace(found, note=f"{num_bare} of {cluster.num_running()}")
    cluster.deploy(REPLICAS, step_ms=11)
    cluster.kill_node(nodes[0])  # so that none of those that stay is there
    return found


def node_killed(cluster: LocalCluster) -> Seen:
    def happen() -> Holds:
        before = cluster.replicas()
        cluster.kill_node(cluster.nodes[0])
        time.sleep(1)
        return lambda: len(cluster.replicas()) == REPLICAS and before.keys() != cluster.replicas().keys()

    return while_asked(cluster, "node killed", happen, "of two; the head stays")


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


# In this order: what changes the cluster most comes last.
FAULTS: dict[str, Callable[[LocalCluster], Seen]] = {
    "replica": replica_killed,
    "router": router_killed,
    "front": front_killed,
    "controller": controller_killed,
    "long": long_bodies,
    "leave": clients_leave,
    "slow": slow_replica,
    "update": rolling_update,
    "failed": failed_update,
    "down": scaled_down,
    "up": scaled_up,
    "node": node_killed,
    "port": without_a_port,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--kills", type=int, default=0, help="kill so many replicas more, and count what hangs")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    found: list[Seen] = []
    with start_local() as cluster:
        cluster.deploy(REPLICAS)
        cluster.wait_until(lambda: is_whole(cluster), "the start")
        for name in arguments.only:
            found.append(FAULTS[name](cluster))
            print(found[-1], flush=True)
            if cluster.seconds_until(lambda: is_whole(cluster), LIMIT_SECONDS) is None:
                print(f"After '{name}' the cluster is not whole again, so no more faults are tried.", file=sys.stderr)
                return {"faults": [asdict(one) for one in found]}, table(found)
        if arguments.kills:
            found.append(many_kills(cluster, arguments.kills))
    return {"faults": [asdict(one) for one in found]}, table(found)


def is_whole(cluster: LocalCluster) -> bool:
    return len(cluster.replicas()) == cluster.num_replicas and cluster.answers()


def many_kills(cluster: LocalCluster, number: int) -> Seen:
    """Kill one replica after the other, each as soon as the one before has been replaced."""
    clients = Clients(cluster.port)
    clients.start()
    kills, longest = [], 0.0
    for killed in range(number):
        name, port = busiest(cluster)
        kills.append(time.monotonic())
        cluster.kill(cluster.pid_of(port))
        took = cluster.seconds_until(
            lambda name=name: name not in cluster.replicas() and len(cluster.replicas()) == REPLICAS,  # type: ignore[misc]
            LIMIT_SECONDS,
        )
        longest = max(longest, LIMIT_SECONDS if took is None else took)
        print(f"kill {killed + 1}: replaced after {took} s, {counts(clients.answers)}", flush=True)
    answers = clients.stop()
    of_kills = [
        seen("", [answer for answer in answers if began <= answer.ended < ended], began)
        for began, ended in pairwise([*kills, math.inf])
    ]
    found = seen(f"{number} replicas killed, one after the other", answers, kills[0], longest)
    longest_bad = max(one.bad_seconds for one in of_kills)
    return replace(found, bad_seconds=longest_bad, note="bad and replaced: the longest of all")


def table(found: list[Seen]) -> str:
    head = ["fault", "answers", "whole", "not whole", "bad for", "all there again after", ""]
    rows = [head]
    for one in found:
        bad = ", ".join(f"{number} {end}" for end, number in one.answers.items() if end != End.WHOLE)
        repaired = "" if one.repaired_seconds is None else f"{one.repaired_seconds:.1f} s"
        total = sum(one.answers.values())
        whole = one.answers.get(End.WHOLE, 0)
        rows.append([one.fault, str(total), str(whole), bad or "none", f"{one.bad_seconds:.1f} s", repaired, one.note])
    return "\n".join(as_markdown(rows))
