"""Prefill apart from decode: some replicas compute prompts and hand their keys and values to others, which decode."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from oaiserve.facts.report import ReplicaReport
from tools.fleet.coarse import CoarseReplica, Size
from tools.fleet.figures import Histogram
from tools.fleet.fleet import TICK_SECONDS
from tools.fleet.policies import LeastConnections, Ours
from tools.fleet.setups import GPU, milliseconds
from tools.fleet.traffic import Call, Mix, Traffic
from tools.markdown import as_markdown, number

NUM_REPLICAS = 16
BYTES_PER_TOKEN = 32 * 1024  # of keys and values
LINK_BYTES_PER_SECOND = 40e9  # from one replica to another
# The kinds of traffic in which it might pay: the usual one, and long prompts with long answers.
TRAFFIC = {"mixed": Mix(), "documents": Mix(chat=0, agent=0, document=1, single=0)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=12, help="simulated time (default 12), a third to warm up")


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    results: dict[str, Any] = {}
    rows = [("requests", "replicas", "per replica", "TTFT p50", "p99", "ITL p50", "p99", "first gap p99", "moved")]
    for name, mix in TRAFFIC.items():
        for rate in (40, 80) if name == "mixed" else (15, 30):
            setups = [(f"16 together, steps of {most:,}", 0, most) for most in (2048, 512)]
            setups += [(f"{count} prefill, {NUM_REPLICAS - count} decode", count, 2048) for count in (4, 8, 12)]
            for setup, num_prefill, most in setups:
                figures = simulate(num_prefill, most, rate * NUM_REPLICAS, mix, arguments.seconds)
                results[f"{name}, {rate}/s, {setup}"] = figures
                times = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "first_gap_p99")
                moved = f"{number(figures['moved_gb_per_second'])} GB/s" if num_prefill else ""
                rows.append((name, setup, f"{rate}/s", *(milliseconds(figures[key]) for key in times), moved))
    return results, "\n".join(as_markdown(rows))


def simulate(num_prefill: int, max_step_tokens: int, rate: float, mix: Mix, seconds: float) -> dict[str, float]:
    """Simulate a fleet, `num_prefill` of which only compute prompts; 0: all replicas do both."""
    size = Size(400_000, max_step_tokens=max_step_tokens)
    replicas = [CoarseReplica(size, GPU, reports=True) for _ in range(NUM_REPLICAS)]
    first = range(num_prefill or NUM_REPLICAS)
    router, decoders = Ours(len(first)), LeastConnections(NUM_REPLICAS - num_prefill)
    traffic, num_open = Traffic(rate, mix), np.zeros(NUM_REPLICAS, np.int64)
    to_decode: dict[int, Call] = {}  # by the id of what prefills
    ttfts: list[float] = []
    gaps: list[float] = []
    moved = 0
    warm_up = seconds / 3
    for tick in range(round(seconds / TICK_SECONDS)):
        now = tick * TICK_SECONDS
        if tick == round(warm_up / TICK_SECONDS):
            for replica in replicas:
                replica.itl = Histogram()
        for call in traffic.until(now, now + TICK_SECONDS):
            index = router.choose(call, num_open, now)
            if num_prefill:
                rest, call.answer = call.answer, 1
                length = call.num_tokens + 1
                to_decode[id(call)] = Call(0.0, call.kind, call.path, length, rest - 1, None, num_brought=length - 1)
            replicas[index].push(call)
            num_open[index] += 1
        for index, replica in enumerate(replicas):
            replica.advance(now + TICK_SECONDS)
            for call in replica.finished:
                num_open[index] -= 1
                if index in first and call.arrival >= warm_up:
                    ttfts.append(call.ttft)
                if index not in first:
                    gaps.append(call.ttft)
                elif num_prefill:
                    decoding = to_decode.pop(id(call))
                    num_bytes = call.num_tokens * BYTES_PER_TOKEN
                    moved += num_bytes
                    decoding.arrival = call.arrival + call.ttft + num_bytes / LINK_BYTES_PER_SECOND
                    at = num_prefill + decoders.choose(decoding, num_open[num_prefill:], now)
                    replicas[at].push(decoding)
                    num_open[at] += 1
            replica.finished.clear()
        for index in first:
            if index % 100 == tick % 100:
                replica = replicas[index]
                keys = replica.held.keys(replica.is_cached)
                report = ReplicaReport(str(index), "", tick, replica.num_open, replica.waiting_tokens, keys)
                router.learn(report, now + TICK_SECONDS)
    itl = Histogram()
    for index, replica in enumerate(replicas):
        if index not in first or not num_prefill:
            itl.counts += replica.itl.counts
        if index in first:
            ttfts += [seconds - call.arrival for call in replica.open_calls() if call.ttft < 0]
    return {
        "ttft_p50": float(np.percentile(ttfts, 50)),
        "ttft_p99": float(np.percentile(ttfts, 99)),
        "itl_p50": itl.percentile(0.5),
        "itl_p99": itl.percentile(0.99),
        "first_gap_p99": float(np.percentile(gaps, 99)) if gaps else itl.percentile(0.99),
        "moved_gb_per_second": moved / seconds / 1e9,
    }
