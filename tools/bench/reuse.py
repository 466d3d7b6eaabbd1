"""Measures what it costs to explain what a prompt reused: python -m tools.bench.reuse

The prompts are turns of agents: tools, a system message and a conversation that grows. A time is the median of all
turns, in this process and without an engine. The exit code is 1 if a prompt of 8,000 tokens takes longer than 1 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from oaiserve.engine.request import ChatPrompt, PromptDone, Request, SamplingParams
from oaiserve.engine.sequences.evictions import Evictions
from oaiserve.explain.reuse.recent_prompts import RecentPrompts
from oaiserve.facts.lost_prefix import Eviction
from oaiserve.facts.record import Origin
from oaiserve.facts.times import RequestTimes
from oaiserve.routes.intake.outlines import outline_of
from oaiserve.routes.prompt_reuse import PromptReuse
from tools.markdown import as_markdown, number, write_json

BLOCK_SIZE = 16
LENGTHS = (100, 1_000, 8_000)  # tokens
BYTES_PER_TOKEN = 4
NUM_TOOLS = 16
TOOL_SHARE = 0.3  # of the prompt; short prompts have no tools
LEAST_TOKENS_WITH_TOOLS = 1_000
MESSAGE_BYTES = 800
DECODES = 256
LIMIT_SECONDS = 0.001  # for the longest prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """A request with one prompt, and the tokens of that."""

    request: Request
    token_ids: list[int]


def turn_of(num_tokens: int, random: Random) -> Turn:
    """Return a prompt with a system message of its own, so that each one is read again."""
    num_bytes = num_tokens * BYTES_PER_TOKEN
    tools: list[dict[str, Any]] = []
    if num_tokens >= LEAST_TOKENS_WITH_TOOLS:
        description = "d" * int(num_bytes * TOOL_SHARE / NUM_TOOLS)
        tools = [
            {"type": "function", "function": {"name": f"tool_{i}", "description": description}}
            for i in range(NUM_TOOLS)
        ]
        num_bytes -= int(num_bytes * TOOL_SHARE)
    messages = [{"role": "system", "content": f"It is {random.random()}."}]
    for place in range(max(1, num_bytes // MESSAGE_BYTES)):
        messages.append({"role": "assistant" if place % 2 else "user", "content": "m" * min(num_bytes, MESSAGE_BYTES)})
    prompt = ChatPrompt(messages, tools=tools)
    request = Request("turn", (prompt,), SamplingParams(), origin=Origin("turn", "chat", "", "demo", None, None))
    return Turn(request, [random.randrange(50_000) for _ in range(num_tokens)])


def measured(num_tokens: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of both parts of the work for prompts of this length."""
    random = Random(0)
    recent = RecentPrompts(BLOCK_SIZE, has_cache=True)
    outlines: list[float] = []
    explanations: list[float] = []
    for place in range(repeats):
        turn = turn_of(num_tokens, random)
        reuse = PromptReuse()
        done = PromptDone("turn", 0, turn.token_ids, None, RequestTimes())
        began = time.perf_counter()
        reuse.outlines.append(outline_of(turn.request, turn.request.prompts[0]))
        outlined = time.perf_counter()
        reuse.read(done, f"response {place}", f"request {place}", "client", recent, time.monotonic_ns())
        explanations.append(time.perf_counter() - outlined)
        outlines.append(outlined - began)
    return {"outline": statistics.median(outlines), "explanation": statistics.median(explanations)}


def seconds_of_evictions(repeats: int) -> float:
    """Return the median seconds of noting the evictions of a step of decodes. One sequence in BLOCK_SIZE fills a
    block."""
    evictions = Evictions(10_000)
    hashes = [Random(place).randbytes(16) for place in range(DECODES // BLOCK_SIZE)]
    eviction = Eviction(0, "taker")
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        for block_hash in hashes:
            evictions.note(block_hash, eviction)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def table(results: dict[str, Any]) -> list[str]:
    rows = [["prompt tokens", "outline, ms", "explanation, ms", "both, ms"]]
    for length, parts in results["prompts"].items():
        both = parts["outline"] + parts["explanation"]
        rows.append(
            [f"{int(length):,}", *(number(1e3 * each) for each in (parts["outline"], parts["explanation"], both))]
        )
    noted = number(1e6 * results["evictions_of_a_step"])
    return [
        *as_markdown(rows),
        "",
        f"A step of {DECODES} decodes notes {DECODES // BLOCK_SIZE} evictions in {noted} µs.",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200, help="prompts of each length (default 200)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args(argv)
    prompts = {str(length): measured(length, arguments.repeats) for length in LENGTHS}
    results = {"prompts": prompts, "evictions_of_a_step": seconds_of_evictions(arguments.repeats)}
    print("\n".join(table(results)))
    write_json(arguments.json, results)
    return 0 if sum(prompts[str(LENGTHS[-1])].values()) <= LIMIT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
