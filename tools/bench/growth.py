"""Measures how the time to the first token and memory grow with prompts: python -m tools.bench.growth

Requests run one at a time in this process, with the default settings of a server. Prompts are random, so that the
prefix cache never has them, and each takes KV blocks that were never written to, until none is left.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from datetime import date
from pathlib import Path
from typing import Any

from oaiserve.engine.engine import Engine
from tools.bench import machine, plot
from tools.engine_load import complete, random_prompts
from tools.markdown import add_publishing, as_markdown, publish, results_of

PROMPTS = (16, 64, 256, 512, 1024, 2048, 4096, 8128)
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--plot", type=Path, help="draw the time to the first token by prompt length there, as SVG")
    add_publishing(parser, "growth")
    arguments = parser.parse_args()
    results = results_of(arguments, lambda _: measure())
    publish(arguments, "growth", results, report(results))
    if arguments.plot:
        points = [(row["tokens"], row["ttft_ms"]) for row in results["prompts"]]
        arguments.plot.write_text(
            plot.log_log("Time to the first token", "tokens in the prompt", "ms", [("measured", points)])
        )


def measure() -> dict[str, Any]:
    seeds = itertools.count()
    with Engine.from_pretrained("demo") as engine:
        block_tokens = int(engine.model_info["block_size"])

        def ttft_ms(num_tokens: int) -> float:
            prompts = random_prompts(1, num_tokens, engine.vocab_size, seed=next(seeds))
            return complete(engine, prompts, 1).ttft_ms[0]

        for _ in range(REPEATS):
            ttft_ms(256)  # the warm-up: the native step is compiled
        memory = [_memory(engine)]
        prompts = []
        for num_tokens in PROMPTS:
            found = [ttft_ms(num_tokens) for _ in range(REPEATS)]
            memory.append(_memory(engine))
            prompts.append({"tokens": num_tokens, "ttft_ms": statistics.median(found), "all_ms": found})
        return {
            "created": date.today().isoformat(),
            "machine": machine.sentence(),
            "block_tokens": block_tokens,
            "num_blocks": int(engine.model_info["kv_blocks"]),
            "prompts": prompts,
            "memory": memory,
        }


def _memory(engine: Engine) -> dict[str, float]:
    """Return the number of blocks in the prefix cache and the memory of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    rss_mib = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS:"))
    return {"blocks": engine.snapshot().blocks_cached, "rss_mib": rss_mib}


def report(results: dict[str, Any]) -> str:
    first, *later = results["prompts"]
    rows = [["tokens in the prompt", "TTFT, ms", "of its three", "µs a token", "µs for each one more"]]
    for before, row in zip([first, first, *later], results["prompts"], strict=False):
        more = row["tokens"] - before["tokens"]
        marginal = f"{(row['ttft_ms'] - before['ttft_ms']) / more * 1e3:,.0f}" if more else ""
        spread = f"{min(row['all_ms']):,.1f} to {max(row['all_ms']):,.1f}"
        each = f"{row['ttft_ms'] / row['tokens'] * 1e3:,.0f}"
        rows.append([f"{row['tokens']:,}", f"{row['ttft_ms']:,.1f}", spread, each, marginal])
    blocks = [["blocks in the prefix cache", "RSS, MiB", "KiB for each one more"]]
    first_point, *later_points = results["memory"]
    for before, point in zip([first_point, first_point, *later_points], results["memory"], strict=False):
        more = point["blocks"] - before["blocks"]
        marginal = f"{(point['rss_mib'] - before['rss_mib']) * 1024 / more:,.0f}" if more else ""
        blocks.append([f"{point['blocks']:,}", f"{point['rss_mib']:,.0f}", marginal])
    size = f"{results['num_blocks']:,} blocks of {results['block_tokens']} tokens"
    return "\n".join(
        [f"{results['machine']}; {results['created']}. {size}.", "", *as_markdown(rows), "", *as_markdown(blocks)]
    )


if __name__ == "__main__":
    main()
