"""Measures steps with weights in bfloat16, eight and four bits, in turns: python -m tools.bench.quantized

All three are in this process, with the same tokens and as many threads: decodes of one, 8 and 32 sequences, and a
prompt of 512 tokens. Drawing tokens is left out. `--model` names a folder with a checkpoint; the default is the demo
model.
"""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path
from typing import Any

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.start.load import load_model
from oaiserve.engine.start.native import native_decoder
from oaiserve.engine.start.ways.quantized import load_kept
from oaiserve.files import demo
from oaiserve.files.source import find_model
from tools.bench import machine
from tools.bench.gguf_in_process import LOADS
from tools.bench.step import BLOCK_SIZE, StepBench, middle
from tools.bench.table import spread
from tools.markdown import add_publishing, as_markdown, publish, results_of

FORMS = ("bfloat16", "int8", "int4")
NUM_BLOCKS = max(point.num_blocks for point in LOADS.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="a folder with a checkpoint (default: the demo model)")
    add("--rounds", type=int, default=5, help="of each step, in turns (default 5)")
    add("--seconds", type=float, default=0.4, help="time for each step in a round (default 0.4)")
    add_publishing(parser, "quantized")
    arguments = parser.parse_args()
    results = results_of(arguments, measure)
    publish(arguments, "quantized", results, report(results))


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    benches = _benches(arguments.model or demo.fetched(), arguments.seconds)
    times: dict[str, dict[str, list[float]]] = {name: {form: [] for form in FORMS} for name in LOADS}
    for _ in range(arguments.rounds):
        for name, point in LOADS.items():
            for form, bench in benches.items():
                found = middle(bench.run(point))
                times[name][form].append(found["step"] - found["sample"])
    return {"created": date.today().isoformat(), "machine": machine.sentence(), "ms": times}


def _benches(folder: Path, seconds: float) -> dict[str, StepBench]:
    loaded = load_model(folder, device="cpu", dtype="bfloat16")
    sizes: dict[str, int] = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_threads": default_threads()}
    benches = {
        "bfloat16": StepBench(loaded, native_decoder(loaded, **sizes), seconds),
        "int8": StepBench(loaded, native_decoder(loaded, quantize="int8", **sizes), seconds),
    }
    options = EngineOptions(
        block_size=BLOCK_SIZE, kv_blocks=NUM_BLOCKS, max_model_len=NUM_BLOCKS * BLOCK_SIZE, quantize="int4"
    )
    kept = load_kept(find_model(folder), options)
    torch.set_num_threads(NativeDecoder.torch_threads)
    return benches | {"int4": StepBench(kept.loaded, kept.native, seconds)}


def report(results: dict[str, Any]) -> str:
    """Return the table: ms of a step, and how many times as fast as in bfloat16 it is, by round."""
    rows = [["", *(f"{form}, ms" for form in FORMS), *(f"{form}, times as fast" for form in FORMS[1:])]]
    for name, times in results["ms"].items():
        cells = [spread(times[form]) for form in FORMS]
        for form in FORMS[1:]:
            ratios = [plain / own for plain, own in zip(times[FORMS[0]], times[form], strict=True)]
            cells.append(f"**{spread(ratios)}**")
        rows.append([name, *cells])
    about = f"{results['machine']}; {results['created']}. Median (least..most) of the rounds."
    return "\n".join([about, "", *as_markdown(rows)])


if __name__ == "__main__":
    main()
