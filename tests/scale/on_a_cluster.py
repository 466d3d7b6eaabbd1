"""Checks replicas on a real cluster of Ray with two nodes: python -m tests.scale.on_a_cluster

It is a program of its own, because Ray wants to be imported with the front's settings in the environment, and warns of
much that pytest would take for errors. Each check is a function below, and raises AssertionError.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from oaiserve.config import OptionError
from tests.scale.ray_cluster.clients import KEY, Answer, Clients, End, ask, question
from tests.scale.ray_cluster.local import LocalCluster, start_local
from tools.server_process import exit_on_sigterm, free_port

REPLICAS = 3
CALM_SECONDS = 3.0  # before a fault, and after all is there again
LONG_BODY_BYTES = 600_000  # the front passes on 262,144 to the router


def post(cluster: LocalCluster, body: dict[str, object], **headers: str) -> httpx.Response:
    url = f"http://127.0.0.1:{cluster.port}/v1/completions"
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(url, json=body, headers={"authorization": f"Bearer {KEY}", **named}, timeout=30, trust_env=False)


def get(cluster: LocalCluster, path: str, port: int | None = None) -> httpx.Response:
    url = f"http://127.0.0.1:{port or cluster.port}{path}"
    return httpx.get(url, headers={"authorization": f"Bearer {KEY}"}, timeout=30, trust_env=False)


def is_routed(cluster: LocalCluster) -> bool:
    """Return whether requests come with the router's decision, as they do some moments after a start."""
    if not cluster.answers():
        return False
    post(cluster, {"prompt": "x", "max_tokens": 1}, x_request_id="routed")
    pages = [get(cluster, "/debug/requests?id=routed", port).json() for port in cluster.replicas().values()]
    return any(entry["routing"].get("replica") for page in pages for entry in page["requests"])


def there_is_one_request_id_and_one_trace(cluster: LocalCluster) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    parent = f"00-{trace}-b7ad6b7169203331-01"
    given = post(cluster, {"prompt": "x", "max_tokens": 2}, x_request_id="mine-1", traceparent=parent)
    assert given.headers.get_list("x-request-id") == ["mine-1"], given.headers
    assert given.headers["traceresponse"].split("-")[1] == trace
    assert "server" not in given.headers
    for wrong in ("", "not an id"):
        (made,) = post(cluster, {"prompt": "x", "max_tokens": 2}, x_request_id=wrong).headers.get_list("x-request-id")
        assert re.fullmatch(r"[A-Za-z0-9._-]+", made), made


def requests_that_begin_alike_meet_and_say_why(cluster: LocalCluster) -> None:
    text = "The same long beginning of a prompt. " * 60
    for number in range(4):
        post(cluster, {"prompt": f"{text} {number}", "max_tokens": 2}, x_request_id=f"alike-{number}")
    found: dict[str, Any] = {}
    give_up = time.monotonic() + 5
    while len(found) < 4:  # an account is complete a moment after its answer
        assert time.monotonic() < give_up, found
        for port in cluster.replicas().values():
            for entry in get(cluster, "/debug/requests?id=alike-", port).json()["requests"]:
                found[entry["request_id"]] = entry
    assert len({entry["routing"]["replica"] for entry in found.values()}) == 1, found
    last = found["alike-3"]
    assert last["routing"]["reason"] == "prefix"
    assert last["cached_tokens"] >= last["routing"]["expected_hit_tokens"] > 0


def all_replicas_are_listed_for_prometheus(cluster: LocalCluster) -> None:
    listed = get(cluster, "/cluster/targets").json()
    assert sorted(int(one["targets"][0].rpartition(":")[2]) for one in listed) == sorted(cluster.replicas().values())
    assert all(one["labels"]["replica"] for one in listed)


def too_many_requests_are_refused_by_the_server_itself(cluster: LocalCluster) -> None:
    async def flood() -> list[tuple[End, str]]:
        return await asyncio.gather(*(ask(cluster.port, question(f"{number}", 200)) for number in range(80)))

    ends = asyncio.run(flood())
    refused = [(end, detail) for end, detail in ends if end is not End.WHOLE]
    assert refused, "nothing was refused"
    assert all(end is End.ERROR and "429" in detail for end, detail in refused), refused[:3]


def counts(cluster: LocalCluster, pattern: str) -> Counter[str]:
    """Return the sums of the metrics that match, over the replicas, by what the pattern's first group has."""
    found: Counter[str] = Counter()
    for port in cluster.replicas().values():
        for name, value in re.findall(pattern, get(cluster, "/metrics", port).text, re.MULTILINE):
            found[name] += int(float(value))
    return found


RUNNING = r"^(oaiserve_requests_running) (\S+)"
OUTCOMES = r'^oaiserve_requests_total\{.*outcome="(\w+)".*\} (\S+)'


def a_client_that_leaves_is_cancelled(cluster: LocalCluster) -> None:
    """Clients leave after 0 to 40 ms, while they are routed or their prompts are computed."""

    async def leave() -> None:
        for number in range(200):
            await ask(cluster.port, question(f"leaves {number}", 1000), leave_after=number % 5 / 100)

    before = counts(cluster, OUTCOMES)
    asyncio.run(leave())
    emptied = cluster.seconds_until(lambda: not counts(cluster, RUNNING).total(), 20)
    assert emptied is not None, "what clients have left goes on"
    new = counts(cluster, OUTCOMES) - before
    assert "cancelled" in new, new
    assert not new.keys() & {"rejected", "failed"}, new


def a_long_body_is_answered(cluster: LocalCluster) -> None:
    clients = Clients(cluster.port, number=4, body=question("long", 20) + b" " * LONG_BODY_BYTES)
    clients.start()
    time.sleep(2 * CALM_SECONDS)
    assert {answer.end for answer in clients.stop()} == {End.WHOLE}


def broken_by_a_kill(cluster: LocalCluster, port: int) -> list[tuple[Answer, float]]:
    """Kill the busiest replica. Return answers that were not whole, with the seconds from the kill to their begin."""
    clients = Clients(port)
    clients.start()
    time.sleep(CALM_SECONDS)
    metrics = {name: get(cluster, "/metrics", port).text for name, port in cluster.replicas().items()}
    # Of an idle one, clients would see nothing.
    name = max(metrics, key=lambda name: float(re.findall(RUNNING, metrics[name], re.MULTILINE)[0][1]))
    at = time.monotonic()
    os.kill(cluster.pid_of(cluster.replicas()[name]), signal.SIGKILL)
    cluster.wait_until(lambda: name not in cluster.replicas() and len(cluster.replicas()) == REPLICAS, "the repair")
    time.sleep(CALM_SECONDS)
    return [(answer, answer.began - at) for answer in clients.stop() if answer.end is not End.WHOLE]


def a_replica_that_is_killed_costs_its_own_streams_only(cluster: LocalCluster) -> None:
    bad = broken_by_a_kill(cluster, cluster.port)
    assert len(bad) <= Clients(0).number, bad
    assert {answer.end for answer, _ in bad} <= {End.CUT, End.ERROR}, bad
    assert all(seconds <= 1 for _, seconds in bad), bad


def an_application_without_a_key_is_refused_beside_this_one(cluster: LocalCluster) -> None:
    from oaiserve.scale.on_ray.application import build

    with pytest.raises(OptionError, match="this application would answer anybody"):
        build({"model": "demo"})


def streams_through_the_gateway_go_on_when_a_replica_is_killed(cluster: LocalCluster) -> None:
    port, listed = free_port(), f"http://127.0.0.1:{cluster.port}/cluster/targets"
    command = [sys.executable, "-m", "oaiserve", "route", "--port", f"{port}", "--replica", listed]
    with subprocess.Popen(command, env=os.environ | {"OAISERVE_REPLICA_KEY": KEY}) as gateway:
        try:
            metrics = f"http://127.0.0.1:{port}/metrics"
            cluster.wait_until(lambda: httpx.get(metrics).text.count("replica_up{") == REPLICAS, "the gateway's start")
            assert not broken_by_a_kill(cluster, port)
        finally:
            gateway.terminate()


CHECKS: tuple[Callable[[LocalCluster], None], ...] = (
    there_is_one_request_id_and_one_trace,
    requests_that_begin_alike_meet_and_say_why,
    all_replicas_are_listed_for_prometheus,
    too_many_requests_are_refused_by_the_server_itself,
    a_client_that_leaves_is_cancelled,
    a_long_body_is_answered,
    a_replica_that_is_killed_costs_its_own_streams_only,
    an_application_without_a_key_is_refused_beside_this_one,
    streams_through_the_gateway_go_on_when_a_replica_is_killed,
)


def main() -> None:
    exit_on_sigterm()
    failed = False
    with start_local(num_cpus=2) as cluster:
        cluster.deploy(REPLICAS, step_ms=5, max_running=8, max_waiting=8, api_key=KEY, trusted_proxy=["0.0.0.0/0"])
        cluster.wait_until(lambda: len(cluster.replicas()) == REPLICAS and is_routed(cluster), "the start")
        for check in CHECKS:
            began = time.monotonic()
            try:
                check(cluster)
            except Exception:
                failed = True
                traceback.print_exc()
            print(f"{check.__name__}: {time.monotonic() - began:.1f} s", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
