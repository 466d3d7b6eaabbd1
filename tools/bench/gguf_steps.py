"""Measures decode steps of a GGUF file next to llama.cpp's, in turns: python -m tools.bench.gguf_steps FILE

A step computes a token of one sequence, or of each of eight, without sampler and server on both sides. Each has one
thread, and its time is the least CPU time of a step in a turn, because the machine may be busy. With --formats, the
matrices of the layers are random blocks of each format in turn: a step takes as long whatever the weights are.

With --served, both serve the file over HTTP to one client and to eight, with one thread each. With --quantize,
llama.cpp quantizes the file to each of --formats by the importance of its weights, instead of random blocks.
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
from tools.bench import client, prepare
from tools.bench.process_usage import cpu_seconds
from tools.bench.servers import llama_cpp, oaiserve
from tools.bench.table import spread
from tools.bench.workloads import Workload
from tools.engine_load import random_prompts
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.quality.__main__ import BLOCK_SIZE, WAYS, compile_llama_logits, native_of, of_native, text
from tools.server_process import ServerProcess, exit_on_sigterm

BEFORE = 16  # tokens of the context before the first token that is computed again
ALL = (Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S, Kind.TQ1_0, Kind.TQ2_0)
DECODES = {way: together for way, together in WAYS.items() if together}
Times = dict[str, float]  # milliseconds of a step, by the way that decodes are computed
SERVERS = ("oaiserve", "llama.cpp")
MAX_LEN = 512  # tokens of a served request
IMPORTANCE_CHUNKS = 10  # A chunk has 512 tokens, whose activations weigh the errors of a quantization.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="GGUF file")
    add("--formats", nargs="*", choices=[kind.name for kind in ALL], help="of the layers (without names: all)")
    add("--llama", type=Path, default=prepare.FOLDER, metavar="BUILD", help="folder of a static build of llama.cpp")
    add("--tokens", type=int, default=24, help="computed in each way and turn (default: %(default)s)")
    add("--turns", type=int, default=3, help="default: %(default)s")
    add("--served", action="store_true", help="measure tokens per second over HTTP")
    add("--quantize", action="store_true", help="let llama.cpp make the files of --formats")
    add_publishing(parser, "gguf-steps")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, measure)
    show = report_served if results["is_served"] else report
    publish(arguments, "gguf-steps", results, show(results["files"]))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with TemporaryDirectory(dir=arguments.model.parent) as folder:
        program = Path(folder) / "llama_logits"
        if not arguments.served:
            compile_llama_logits(arguments.llama, program)
        files = {
            title: served_turns_of(path, arguments.turns) if arguments.served else turns_of(path, program, arguments)
            for title, path in files_of(arguments, Path(folder))
        }
    return {"model": arguments.model.name, "is_served": arguments.served, "files": files}


def files_of(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files to measure, one after the other, with what the tables call them. Raises NotInstalled."""
    if arguments.formats is None:
        yield arguments.model.name, arguments.model
        return
    for kind in [Kind[name] for name in arguments.formats] or ALL:
        if arguments.quantize:
            yield kind.name, quantized(arguments.model, kind)
        else:
            path = folder / "random.gguf"
            write_with_random_blocks(arguments.model, kind, path)
            yield kind.name, path


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


def quantized(source: Path, kind: Kind) -> Path:
    """Return the file that llama.cpp makes of a model in a format, with the importance of its activations for the text
    of `tools.quality`. Files are stored with those of the benchmarks. Raises NotInstalled."""
    folder = prepare.FOLDER / "models/gguf"
    programs = prepare.llama_cpp()
    importance = folder / f"{source.stem}.imatrix.gguf"
    path = folder / f"{source.stem}.{kind.name}.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    if not importance.exists():
        sample = folder / "importance.txt"
        sample.write_text(text(8 * IMPORTANCE_CHUNKS * 512))
        unfinished = importance.with_suffix(".part.gguf")
        chunks = ("--chunks", str(IMPORTANCE_CHUNKS), "--ctx-size", "512", "--no-ppl")
        prepare.run(programs / "llama-imatrix", "--model", source, "--file", sample, "--output", unfinished, *chunks)
        unfinished.replace(importance)
    if not path.exists():
        unfinished = path.with_suffix(".part")
        flags = ("--allow-requantize", "--imatrix", importance)
        prepare.run(programs / "llama-quantize", *flags, source, unfinished, kind.name)
        unfinished.replace(path)
    return path


def served_turns_of(model: Path, num_turns: int) -> list[dict[str, dict[str, dict[str, float]]]]:
    """Return the figures of both servers in each turn, by the number of clients."""
    most = max(DECODES.values())
    ours = oaiserve(model, "--cpu-threads", "1", "--max-running", str(most), "--max-model-len", str(MAX_LEN))
    theirs = llama_cpp(model, "--threads", "1", "--threads-batch", "1", slots=most, slot_tokens=MAX_LEN)
    turns = []
    with ours.running() as our_server, theirs.running() as their_server:
        servers = dict(zip(SERVERS, (our_server, their_server), strict=True))
        for turn in range(num_turns):
            figures: dict[str, dict[str, dict[str, float]]] = {name: {} for name in servers}
            for clients in DECODES.values():
                load = Workload("W0", "short prompts", max(2, clients), 0, 32, 64, concurrency=clients)
                for name in SERVERS[:: -1 if turn % 2 else 1]:
                    figures[name][str(clients)] = served_figures(servers[name], load, seed=100 * turn + clients)
            turns.append(figures)
            print(f"{model.name}: {figures}", flush=True)
    return turns


def served_figures(server: ServerProcess, load: Workload, seed: int) -> dict[str, float]:
    """Return the tokens of answers per second, and per second of the server's CPU time. Raises RunFailed."""
    seconds_before = cpu_seconds(server.process.pid)
    run = client.run(server, load, seed)
    seconds = cpu_seconds(server.process.pid) - seconds_before
    num_tokens = load.num_requests * load.output_len - run["missing_tokens"]
    per_second = run["output_throughput"]
    return {"per_second": per_second, "per_cpu_second": num_tokens / seconds, "other_cores": run["other_cores"]}


def report_served(files: dict[str, list[dict[str, dict[str, dict[str, float]]]]]) -> str:
    """Return a table: the medians of all turns, and how many times as fast we are in the turns and by CPU time."""
    heads = (*(f"{name}, tokens/s" for name in SERVERS), "times as fast", "by CPU time")
    lines = [["file", "clients", *heads]]
    others = 0.0
    for name, turns in files.items():
        for clients in turns[0][SERVERS[0]]:
            ours, theirs = ([turn[server][clients] for turn in turns] for server in SERVERS)
            others = max(others, *(each["other_cores"] for each in (*ours, *theirs)))
            rates = [number(statistics.median(each["per_second"] for each in runs)) for runs in (ours, theirs)]
            ratios = [
                spread([our[key] / their[key] for our, their in zip(ours, theirs, strict=True)])
                for key in ("per_second", "per_cpu_second")
            ]
            lines.append([name, clients, *rates, *ratios])
    load = f"Other processes of the machine used {others:.2f} cores at most, on average over a turn."
    return "\n".join([*as_markdown(lines), "", load])


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
