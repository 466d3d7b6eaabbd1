"""Measures how far a served model's answers are from those of its weights in float32: python -m tools.quality FILE

For each token of a text, the distribution of the next token is compared with that of transformers' code in float32:
the mean Kullback-Leibler divergence in nats, and how often the likeliest token is the same. Tokens are computed as
parts of a prompt, as decodes alone and as decodes of several sequences, with each cache type and quantization. With
--llama, llama.cpp computes the same tokens of the same file. With --reference llama, its distributions for a prompt
are those that all others are compared with.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json.decoder
import pydoc_data.topics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from oaiserve.checkpoints.source import find_model
from oaiserve.config import Dtype, EngineOptions, KVCacheDtype, Quantize
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.model_config import context_length
from oaiserve.engine.request import SamplingParams, TextPrompt
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.start.load import config_of
from oaiserve.engine.start.plan import start_model
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.runtime import THREADS
from oaiserve.system_cpus import default_threads
from tools.bench import prepare
from tools.markdown import add_publishing, as_markdown, publish, results_of
from tools.quality.reference import Reference

BOUNDS = (0, 1, 16, 512, 2000, 6000)  # bounds of the ranges of positions
WAYS = {"prefill": 0, "decode": 1, "8 decodes": 8}  # with the decodes of a step
BLOCK_SIZE = 16
CHUNK = 512  # tokens of a step of a prompt
ROWS = 64  # rows whose logits are compared at once
PIECE = 2000  # characters of prose or of code, which take turns in the text
LLAMA_CACHES = ("f16", "q8_0")


class Answers(Protocol):
    def logits(self, rows: list[int]) -> Tensor:
        """Return the logits float32 [rows, vocab] of these positions."""


class Stored:
    """Logits that are in memory."""

    def __init__(self, rows: list[int], logits: Iterator[Tensor]) -> None:
        """`logits` has a tensor [1, vocab] for each row."""
        self._by_row = dict(zip(rows, logits, strict=True))

    def logits(self, rows: list[int]) -> Tensor:
        return torch.cat([self._by_row[row] for row in rows])


class Distance(NamedTuple):
    """How far logits of some positions are from the reference's."""

    divergences: Tensor  # in nats
    is_same: Tensor  # whether the likeliest token is the same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file, or folder of a checkpoint")
    caches = [cache for cache in get_args(KVCacheDtype) if cache != "fp8"]
    parser.add_argument("--caches", nargs="+", default=caches, choices=caches, help="default: all of a CPU")
    parser.add_argument("--quantize", nargs="+", choices=get_args(Quantize), help="default: all that the model allows")
    parser.add_argument("--dtype", default="auto", choices=get_args(Dtype), help="as the server's flag")
    parser.add_argument("--tokens", type=int, default=BOUNDS[-1], help="of the text (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=256, help="compared in each range (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="beside prefill (default: all)")
    parser.add_argument(
        "--llama",
        type=Path,
        nargs="?",
        const=prepare.FOLDER,
        metavar="BUILD",
        help="compare llama.cpp, too, in this folder of a static build; without a folder, in the one of the benchmarks",
    )
    parser.add_argument("--reference", default="float32", choices=("float32", "llama"), help="default: %(default)s")
    add_publishing(parser, "quality")
    arguments = parser.parse_args()
    results = results_of(arguments, measure)
    publish(arguments, "quality", results, table(results["runs"]))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare all runs, and return the figures of each by way and range."""
    source = find_model(arguments.model)
    config = config_of(source)
    num_tokens = min(arguments.tokens, BOUNDS[-1], context_length(config))
    ids = Tokenizer.from_pretrained(source.path).encode(TextPrompt(text(8 * num_tokens)))[:num_tokens]
    rows = chosen(len(ids), arguments.positions)
    torch.set_num_threads(default_threads())
    build = arguments.llama or prepare.FOLDER
    if arguments.reference == "llama":
        reference: Answers = Stored(rows, of_llama(build, source.path, ids, rows, LLAMA_CACHES[0], ["prefill"]))
    else:
        reference = Reference(source, ids, prepare.FOLDER / "quality")
    is_quantized = source.gguf_file is not None or hasattr(config, "quantization_config")
    runs: dict[str, Any] = {}
    ways = ["prefill", *(way for way in arguments.ways if way != "prefill")]  # decodes read what it writes
    for quantize in arguments.quantize or (["none"] if is_quantized else get_args(Quantize)):
        for cache in arguments.caches:
            options = EngineOptions(
                device="cpu",
                dtype=arguments.dtype,
                quantize=quantize,
                kv_cache_dtype=cache,
                max_model_len=num_tokens,
                kv_blocks=-(-num_tokens // BLOCK_SIZE) + 1,
                block_size=BLOCK_SIZE,
            )
            name = f"oaiserve{f', {quantize}' if quantize != 'none' else ''}, {cache} cache"
            runs[name] = {}
            native = native_of(arguments.model, options)
            for way in ways:
                logits = of_native(native, ids, rows, way)
                runs[name][way] = shown(name, way, figures(rows, compare(reference, rows, logits)))
            del native
            gc.collect()
    for cache in LLAMA_CACHES if arguments.llama else ():
        name = f"llama.cpp, {cache} cache"
        by_way = runs[name] = {}
        logits = of_llama(build, source.path, ids, rows, cache, ways)
        for way in ways:
            by_way[way] = shown(name, way, figures(rows, compare(reference, rows, logits)))
    return {"model": arguments.model.name, "tokens": len(ids), "positions": len(rows), "runs": runs}


def text(num_characters: int) -> str:
    """Return prose and code of Python's own files, in turns."""
    topics = pydoc_data.topics.topics
    prose = "".join(topics[name] for name in sorted(topics))
    code = "".join(map(inspect.getsource, (json.decoder, textwrap, argparse, tempfile)))
    starts = range(0, num_characters // 2 + PIECE, PIECE)
    return "\n\n".join(whole[start : start + PIECE] for start in starts for whole in (prose, code))


def ranges() -> list[tuple[int, int]]:
    return list(pairwise(BOUNDS))


def chosen(num_tokens: int, most: int) -> list[int]:
    """Return the positions that are compared: at most `most` of each range, evenly spaced."""
    positions: list[int] = []
    for begin, end in ranges():
        end = min(end, num_tokens)
        count = min(most, max(0, end - begin))
        positions += [begin + (end - begin) * place // count for place in range(count)]
    return positions


def native_of(model: Path, options: EngineOptions) -> NativeDecoder:
    served = start_model(model, options, StartTimes(), lambda: None, THREADS)
    native = served.runner.executor if isinstance(served.runner, ModelRunner) else None
    if not isinstance(native, NativeDecoder) or served.num_states:
        raise SystemExit("Only models whose native step keeps nothing but keys and values are compared.")
    return native


@torch.inference_mode()
def of_native(native: NativeDecoder, ids: list[int], rows: list[int], way: str) -> Iterator[Tensor]:
    """Yield the logits of the rows as parts of a prompt or as decodes after it. A prompt comes first."""
    sequence = Sequence("quality", 0, ids, SamplingParams(), max_len=len(ids) + 1)
    sequence.blocks = list(range(-(-len(ids) // BLOCK_SIZE)))
    if way == "prefill":
        for start in range(0, len(ids), CHUNK):
            count = min(CHUNK, len(ids) - start)
            batch = build_batch(Step([Chunk(sequence, start, count)]), BLOCK_SIZE, torch.device("cpu"))
            wanted = [row - start for row in rows if start <= row < start + count]
            batch.logits_rows = torch.tensor(wanted or [count - 1])
            logits = native.forward(batch)
            if wanted:
                yield logits
        return
    for together in pieces(rows, WAYS[way]):
        step = Step([Chunk(sequence, row, 1) for row in together])
        yield native.forward(build_batch(step, BLOCK_SIZE, torch.device("cpu")))


def pieces(rows: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def compile_llama_logits(build: Path, program: Path) -> None:
    """Compile the program that llama.cpp computes logits with. Raises NotInstalled."""
    build = prepare.llama_cpp().parent if build == prepare.FOLDER else build
    lines = (line.partition("=") for line in (build / "CMakeCache.txt").read_text().splitlines())
    home = Path({name: value for name, _, value in lines}["CMAKE_HOME_DIRECTORY:INTERNAL"])
    prepare.run(
        *("c++", "-O2", "-std=c++17", "-fopenmp", "-pthread", "-o", program),
        *(f"-I{home / include}" for include in ("include", "ggml/include")),
        *(Path(__file__).with_name("llama_logits.cpp"), "-Wl,--start-group"),
        *(*build.rglob("libllama.a"), *build.rglob("libggml*.a"), "-Wl,--end-group", "-ldl"),
    )


def of_llama(
    build: Path, model: Path, ids: list[int], rows: list[int], cache: str, ways: list[str]
) -> Iterator[Tensor]:
    """Yield llama.cpp's logits of the rows for each way, of which prefill is the first. Raises NotInstalled."""
    with tempfile.TemporaryDirectory() as folder:
        program, inputs, log = (Path(folder, name) for name in ("llama_logits", "inputs", "log"))
        compile_llama_logits(build, program)
        inputs.write_text(f"{len(ids)} {' '.join(map(str, ids))}\n{len(rows)} {' '.join(map(str, rows))}\n")
        words = [program, model, cache, str(default_threads()), *(str(WAYS[way]) for way in ways[1:])]
        with (
            inputs.open() as stdin,
            log.open("w") as stderr,
            subprocess.Popen(words, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr) as process,
        ):
            assert process.stdout is not None
            num_bytes = int.from_bytes(process.stdout.read(4), sys.byteorder)  # length of a row
            while len(row := process.stdout.read(num_bytes)) == num_bytes > 0:
                yield torch.from_numpy(np.frombuffer(row, np.float32).copy())[None]
        if process.returncode:
            raise prepare.NotInstalled(f"llama.cpp failed: {log.read_text()[-500:].strip()}")


def compare(reference: Answers, rows: list[int], logits: Iterator[Tensor]) -> Distance:
    """Compare the next logits of these rows, in order, with the reference's."""
    divergences = []
    is_same = []
    num_rows = 0
    torch.set_num_threads(default_threads())
    while num_rows < len(rows):
        computed = [next(logits).clone()]
        while (count := sum(map(len, computed))) < min(ROWS, len(rows) - num_rows):
            computed.append(next(logits).clone())
        actual = torch.cat(computed).log_softmax(-1)
        expected = reference.logits(rows[num_rows : num_rows + count]).log_softmax(-1)
        actual = actual[:, : expected.shape[1]]
        divergences.append((expected.exp() * (expected - actual)).double().sum(-1))
        is_same.append(expected.argmax(-1) == actual.argmax(-1))
        num_rows += count
    return Distance(torch.cat(divergences), torch.cat(is_same))


def figures(rows: list[int], distance: Distance) -> dict[str, list[float]]:
    """Return the mean divergence and the share of same tokens of each range, by its first position."""
    by_range: dict[str, list[float]] = {}
    positions = torch.tensor(rows)
    for begin, end in ranges():
        within = (begin <= positions) & (positions < end)
        if within.any():
            means = distance.divergences[within].mean(), distance.is_same[within].double().mean()
            by_range[str(begin)] = [float(mean) for mean in means]
    return by_range


def shown(run: str, way: str, found: dict[str, list[float]]) -> dict[str, list[float]]:
    """Print figures as soon as they are found, and return them."""
    print(f"{run}, {way}: {found}", file=sys.stderr, flush=True)
    return found


def table(runs: dict[str, Any]) -> str:
    """Return the figures as a table."""
    names = ["0" if end == begin + 1 else f"{begin:,} to {end - 1:,}" for begin, end in ranges()]
    lines = [["", "tokens are computed by", *names]]
    for run, by_way in runs.items():
        for way, by_range in by_way.items():
            cells = []
            for begin, _ in ranges():
                values = by_range.get(str(begin))
                cells.append("" if values is None else f"{values[0]:.5f}, {values[1]:.1%}")
            lines.append([run, way, *cells])
    return "\n".join(as_markdown(lines))


if __name__ == "__main__":
    main()
