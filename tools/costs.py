"""Compares what requests cost with the machine's meters: python -m tools.costs

Clients of several kinds load the demo model, and one client repeats the same request: first alone, then with them.
Prints the sums of the costs and the meters, and the cost of that request alone, as measured and as reported.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from threading import Thread

import httpx

from loadtest.metrics_page import parse_metrics
from tools.server_process import exit_on_sigterm, running_oaiserve

# Kinds of clients: most words of a prompt, most tokens of an answer.
KINDS = [(20, 60)] * 4 + [(200, 20)] * 3 + [(10, 200)]
SAME = (60, 48)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=150, help="of load (default 150)")
    parser.add_argument("--pause", type=float, default=2.5, help="seconds between the requests of a client, on average")
    args = parser.parse_args()
    exit_on_sigterm()
    with running_oaiserve("--recent-requests", "100000", "--no-prefix-cache", "--drafts", "off") as server:
        alone = [ask(server.url, *SAME) for _ in range(8)][2:]  # The first requests serve to measure the cost of steps.
        end = time.monotonic() + args.seconds
        threads = [Thread(target=load, args=(server.url, *kind, end, args.pause)) for kind in KINDS]
        for thread in threads:
            thread.start()
        beside = []
        while time.monotonic() < end:
            beside.append(ask(server.url, *SAME))
            time.sleep(random.expovariate(1 / args.pause))
        for thread in threads:
            thread.join()
        alone += [ask(server.url, *SAME) for _ in range(6)]
        time.sleep(1)  # until the last one is recorded
        costs = [each["cost"] for each in httpx.get(f"{server.url}/debug/requests").json()["requests"]]
        page = parse_metrics(httpx.get(f"{server.url}/metrics").text)
        meters = {name: value for (name, _), value in page.items()}
    nobody, total = (meters[f"oaiserve_{name}_core_seconds_total"] for name in ("nobody", "meter"))
    requests = sum(cost["core_ns"] for cost in costs) / 1e9
    process = meters["process_cpu_seconds_total"]
    print(f"{len(costs)} requests: {requests:.9f} s of cores, nobody {nobody:.9f} s; the meter {total:.9f} s")
    print(f"the process by Linux at the scrape: {process:.2f} s")
    held = sum(cost["kv_byte_seconds"] for cost in costs)
    print(f"KV cache: {held:.6g} of {meters['oaiserve_meter_kv_byte_seconds_total']:.6g} byte-seconds")
    real = statistics.median(cost["core_ns"] for cost in alone)
    for name, measured in (("alone", alone), ("beside others", beside)):
        ratios = sorted(cost["alone_core_ns"] / real for cost in measured)
        own = statistics.median(cost["core_ns"] for cost in measured)
        near = sum(abs(r - 1) <= 0.05 for r in ratios)
        print(f"{name}: {own / 1e6:.0f} ms of cores; said to be alone {statistics.median(ratios):.3f} of really alone")
        print(f"  {ratios[0]:.3f} to {ratios[-1]:.3f}; within 5 %: {near} of {len(ratios)}")


def ask(url: str, words: int, tokens: int) -> dict[str, float]:
    body = {"prompt": " ".join(f"{number}" for number in range(words)), "max_tokens": tokens, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-include-cost": "true"}, timeout=600)
    cost: dict[str, float] = answer.json()["usage"]["oaiserve_cost"]
    return cost


def load(url: str, words: int, tokens: int, end: float, pause: float) -> None:
    while time.monotonic() < end:
        ask(url, random.randint(1, words), random.randint(1, tokens))
        time.sleep(random.expovariate(1 / pause))


if __name__ == "__main__":
    main()
