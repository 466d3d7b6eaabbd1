"""Measures decode steps of a GGUF file next to llama.cpp's, in turns: python -m tools.bench.gguf_steps FILE

A step computes a token of one sequence, or of each of eight, without sampler and server on both sides. Each has one
thread, and its time is the least CPU time of a step in a turn, because the machine may be busy. With --formats, the
matrices of the layers are random blocks of each format in turn: a step takes as long whatever the weights are.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from oaiserve.config import EngineOptions
from tests.models.gguf_files import finish, random_blocks
from tools.bench import prepare
from tools.engine_load import random_prompts
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.quality.__main__ import BLOCK_SIZE, WAYS, compile_llama_logits, native_of, of_native

BEFORE = 16  # tokens of the context before the first token that is computed again
ALL = (Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S, Kind.TQ1_0, Kind.TQ2_0)
DECODES = {way: together for way, together in WAYS.items() if together}
Times = dict[str, float]  # milliseconds of a step, by the way that decodes are computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="GGUF file")
    add("--formats", nargs="*", choices=[kind.name for kind in ALL], help="of the layers (without names: all)")
    add("--llama", type=Path, default=prepare.FOLDER, metavar="BUILD", help="folder of a static build of llama.cpp")
    add("--tokens", type=int, default=24, help="computed in each way and turn (default: %(default)s)")
    add("--turns", type=int, default=3, help="default: %(default)s")
    add_publishing(parser, "gguf-steps")
    arguments = parser.parse_args()
    results = results_of(arguments, measure)
    publish(arguments, "gguf-steps", results, report(results["files"]))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    kinds = None if arguments.formats is None else [Kind[name] for name in arguments.formats] or ALL
    files: dict[str, Any] = {}
    with TemporaryDirectory(dir=arguments.model.parent) as folder:
        program = Path(folder) / "llama_logits"
        compile_llama_logits(arguments.llama, program)
        if kinds is None:
            files[arguments.model.name] = turns_of(arguments.model, program, arguments)
        for kind in kinds or ():
            path = Path(folder) / "random.gguf"
            write_with_random_blocks(arguments.model, kind, path)
            files[kind.name] = turns_of(path, program, arguments)
    return {"model": arguments.model.name, "files": files}


def turns_of(model: Path, program: Path, arguments: argparse.Namespace) -> list[dict[str, Times]]:
    """Return the times of both in each turn."""
    length = BEFORE + arguments.tokens
    (ids,) = random_prompts(1, length, vocab_size=1000)
    rows = list(range(BEFORE, length))
    blocks = -(-length // BLOCK_SIZE) + 1
    options = EngineOptions(device="cpu", max_model_len=length, kv_blocks=blocks, block_size=BLOCK_SIZE, cpu_threads=1)
    native = native_of(model, options)
    turns = []
    for _ in range(arguments.turns):
        ours = {way: least_ms(of_native(native, ids, rows, way)) for way in ("prefill", *DECODES)}
        turns.append({"oaiserve": ours, "llama.cpp": times_of_llama(program, model, ids, rows)})
        print(f"{model.name}: {turns[-1]}", flush=True)
    return turns


def least_ms(steps: Iterator[object]) -> float:
    """Return the least CPU time of a step."""
    times = []
    while True:
        began = time.process_time()
        if next(steps, None) is None:
            return 1e3 * min(times)
        times.append(time.process_time() - began)


def times_of_llama(program: Path, model: Path, ids: list[int], rows: list[int]) -> Times:
    """Return the times of llama.cpp. Raises CalledProcessError."""
    words = [program, model, "f16", "1", *map(str, DECODES.values())]
    inputs = f"{len(ids)} {' '.join(map(str, ids))}\n{len(rows)} {' '.join(map(str, rows))}\n"
    done = subprocess.run(words, input=inputs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
    return times_in(done.stderr)


def times_in(log: str) -> Times:
    """Return the times by the lines of `llama_logits.cpp`."""
    seconds = {int(batch): float(text) for batch, text in re.findall(r"^seconds (\d+) ([\d.]+)$", log, re.MULTILINE)}
    return {way: 1e3 * seconds[together] for way, together in DECODES.items()}


def write_with_random_blocks(source: Path, kind: Kind, path: Path) -> None:
    """Write the file again, with random blocks as the layers' matrices where their rows are whole blocks."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            of_items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=of_items)
    rng = np.random.default_rng(0)
    for tensor in reader.tensors:
        k, *others = map(int, tensor.shape)
        if tensor.name.startswith("blk.") and others and k % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            blocks = random_blocks(rng, kind, others[0], k, scale=1e-3)
            writer.add_tensor(tensor.name, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)


def report(files: dict[str, list[dict[str, Times]]]) -> str:
    """Return a table: the least times of all turns, and the median and the range of how many times as fast we are."""
    heads = [f"{way}: {name}" for way in DECODES for name in ("oaiserve, ms", "llama.cpp, ms", "times as fast")]
    lines = [["", *heads]]
    for name, turns in files.items():
        cells = []
        for way in DECODES:
            ours, theirs = ([turn[each][way] for turn in turns] for each in ("oaiserve", "llama.cpp"))
            ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
            cells += [number(min(ours)), number(min(theirs)), ratio]
        lines.append([name, *cells])
    return "\n".join(as_markdown(lines))


if __name__ == "__main__":
    main()
