"""Measures the native step against ik_llama.cpp, both without HTTP: python -m tools.bench.gguf_in_process

Both have the same GGUF files and as many threads, take turns, and compute the same: prompts of 512 tokens, and decodes
of one, 8 and 32 sequences, without drawing tokens. ik_llama.cpp, a fork of llama.cpp with faster products, packs the
weights anew when it loads them (-rtr), as this server does. IK_LLAMA_CPP names the folder with its source.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.start.ways.quantized import load_kept
from oaiserve.files.source import find_model
from tools.bench import gguf_files, machine, prepare
from tools.bench.step import BLOCK_SIZE, Point, StepBench
from tools.bench.table import spread
from tools.markdown import add_publishing, as_markdown, number, publish, results_of

OURS, PEER = "oaiserve", "ik_llama.cpp"
START, TOKENS = 16, 32  # of each sequence: what it has in the cache, and what is decoded
LOADS = {
    "one sequence": Point(1, 1, START + TOKENS // 2),
    "8 sequences": Point(8, 1, START + TOKENS // 2),
    "32 sequences": Point(32, 1, START + TOKENS // 2),
    "a prompt of 512": Point(1, 512, 512),
}
_ROW = re.compile(r"^\|\s*(\d+) \|\s*(\d+) \|\s*(\d+) \|\s*\d+ \|\s*[\d.]+ \|\s*([\d.]+) \|\s*[\d.]+ \|\s*([\d.]+) \|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=[gguf_files.LLAMA], choices=list(gguf_files.MODELS), help="default: the 1B")
    add("--formats", nargs="+", default=list(gguf_files.FORMATS), help="as llama.cpp's program names them")
    add("--repeats", type=int, default=3, help="rounds (default 3)")
    add("--seconds", type=float, default=2.0, help="time for each of our figures in a round (default 2)")
    add_publishing(parser, "gguf-in-process")
    arguments = parser.parse_args()
    results = results_of(arguments, measure)
    publish(arguments, "gguf-in-process", results, report(results))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for title, path in gguf_files.chosen(arguments.models, arguments.formats).items():
        ours = Ours(path, arguments.seconds)
        for round_number in range(arguments.repeats):
            print(f"round {round_number + 1}: {title}", file=sys.stderr, flush=True)
            runs.append({"model": title, "program": OURS} | ours.rates())
            runs.append({"model": title, "program": PEER} | theirs(path))
    return {"created": date.today().isoformat(), "machine": machine.sentence(), "runs": runs}


class Ours:
    def __init__(self, path: Path, seconds: float) -> None:
        num_blocks = max(point.num_blocks for point in LOADS.values())
        options = EngineOptions(block_size=BLOCK_SIZE, kv_blocks=num_blocks, max_model_len=num_blocks * BLOCK_SIZE)
        kept = load_kept(find_model(path), options)
        self._bench = StepBench(kept.loaded, kept.native, seconds)

    @torch.inference_mode()
    def rates(self) -> dict[str, float]:
        """Return the tokens per second by load, as means over all steps."""
        found = {}
        for name, point in LOADS.items():
            rows = self._bench.run(point)
            seconds = statistics.fmean(row["step"] - row["sample"] for row in rows)
            found[name] = point.num_sequences * point.num_tokens / seconds
        return found


def theirs(path: Path) -> dict[str, float]:
    """Return the tokens per second by load, from the tables that ik_llama.cpp's program prints."""
    decodes = [point.num_sequences for point in LOADS.values() if point.num_tokens == 1]
    found: dict[str, float] = {}
    for prompt, tokens, sequences in ((512, 1, [1]), (START, TOKENS, decodes)):
        sizes = {"-npp": prompt, "-ntg": tokens, "-npl": ",".join(map(str, sequences)), "-ub": 512, "-b": 2048}
        sizes |= {"-c": max(sequences) * (prompt + tokens), "-t": default_threads()}
        program = prepare.ik_llama_cpp() / "llama-batched-bench"
        command = [str(program), "-m", str(path), "-rtr", *(str(part) for pair in sizes.items() for part in pair)]
        # It writes a log into the folder that it runs in.
        run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=prepare.FOLDER / "logs")
        found |= rates_in(run.stdout + run.stderr)
    if found.keys() != LOADS.keys():
        sys.exit(f"llama-batched-bench has not measured all loads, but only {', '.join(found) or 'none'}.")
    return found


def rates_in(output: str) -> dict[str, float]:
    """Return the tokens per second by load, in the order of LOADS, from what llama-batched-bench has printed."""
    rows = [row for line in output.splitlines() if (row := _ROW.match(line))]
    decodes = {(int(row[3]), 1): float(row[5]) for row in rows if int(row[1]) == START}
    prompts = {(1, int(row[1])): float(row[4]) for row in rows if int(row[1]) != START}
    measured = decodes | prompts
    loads = {name: (point.num_sequences, point.num_tokens) for name, point in LOADS.items()}
    return {name: measured[load] for name, load in loads.items() if load in measured}


def report(results: dict[str, Any]) -> str:
    """Return the table: tokens per second, and how many times ik_llama.cpp's these are, by round."""
    rows = [["file", "", OURS, PEER, "ratio"]]
    for title in dict.fromkeys(run["model"] for run in results["runs"]):
        of_model = [run for run in results["runs"] if run["model"] == title]
        for name in LOADS:
            ours, other = ([run[name] for run in of_model if run["program"] == program] for program in (OURS, PEER))
            ratios = [a / b for a, b in zip(ours, other, strict=True)]
            medians = [number(statistics.median(values)) for values in (ours, other)]
            rows.append([title, name, *medians, f"**{spread(ratios)}**"])
    head = f"{results['machine']} {results['created']}. Tokens per second, medians of the rounds."
    return "\n".join([head, "", *as_markdown(rows)])


if __name__ == "__main__":
    main()
