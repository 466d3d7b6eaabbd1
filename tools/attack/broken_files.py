"""Starts the server on broken model files, thousands of them: python -m tools.attack.broken_files --seed 1

A small model is saved in each format that is read: safetensors, packed integers, FP8, MXFP4 and GGUF, and so is an
adapter.
The files are spoiled in many ways: bytes are changed, the file is cut, numbers are replaced by extremes, the JSON of
headers, indexes and configurations is edited. With --every-key, each value in each configuration is replaced by each
kind of JSON in turn instead, and a refusal may not be a bare error of Python, such as a TypeError. Each start is a
process of its own. It must end with one sentence and exit code 2, or the model must answer; it may not crash, hang, or
take memory or time without end. What is spoiled is a function of the seed. Prints the number of outcomes for each
format. The exit code is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import GptOssConfig, LlamaConfig, PreTrainedModel

from oaiserve import cli
from oaiserve.checkpoints.checkpoint import INDEX
from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.engine.executors.native.build import build
from oaiserve.engine.model import adapters  # noqa: F401 - imported once, for all processes
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.start.ways import described, fallback  # noqa: F401
from oaiserve.storage.private import cache_folder
from tests.models.adapters import adaptable, write_adapter
from tests.models.decoders import byte_tokenizer, random_model
from tests.models.gguf_files import random_blocks, write_gguf
from tests.models.packed import Packing, save_in_mxfp4, write_checkpoint, write_fp8
from tools.attack.spoils import (
    Spoil,
    changed_bytes,
    cut,
    edited_header,
    edited_json,
    extreme_in_gguf,
    extreme_number,
    header_end,
    lengthened,
    spoiled,
    with_other_kinds,
)
from tools.markdown import as_markdown

CPU_SECONDS = 60
WALL_SECONDS = 300
MEMORY_BYTES = 4 << 30  # address space, in addition to what a process has before it opens a file
MOST_GROWTH_MIB = 512  # growth of resident memory, in addition to what the sound model takes
MOST_SENTENCE = 1000
FLAGS = ("--port", "0", "--kv-cache-memory", "1MiB", "--cpu-threads", "1", "--device", "cpu", "--log-level", "error")
MOST_SHOWN = 20
_BARE = re.compile(r"\b(TypeError|KeyError|AttributeError|IndexError|OverflowError)\b")

ADAPTER = "adapter"
SHARD = "model-00001-of-00001.safetensors"
WEIGHTS = "model.safetensors"
VOCAB = 256


# -- the sound files --------------------------------------------------------------------------------------------------

LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # as wide as the longest blocks
GPT_OSS = LLAMA | {
    "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
PACKINGS = {
    "GPTQ": Packing("gptq", has_act_order=True),
    "AWQ": Packing("awq"),
    "compressed-tensors": Packing("pack-quantized"),
}
# The formats that the matrices of a GGUF file have in turn.
SHORT_BLOCKS = (Kind.Q8_0, Kind.Q4_0, Kind.F16)
LONG_BLOCKS = (
    *(Kind.Q4_K, Kind.Q6_K, Kind.Q5_K, Kind.IQ4_XS, Kind.Q2_K, Kind.Q3_K),
    *(Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.IQ4_NL, Kind.BF16),
)


def llama() -> PreTrainedModel:
    return random_model(LlamaConfig(**LLAMA))


def write_with_index(folder: Path) -> None:
    """Write a model with an index, as models have it whose weights are in several files."""
    llama().save_pretrained(folder)
    (folder / WEIGHTS).rename(folder / SHARD)
    content = (folder / SHARD).read_bytes()
    tensors = [name for name in json.loads(content[8 : header_end(content)]) if name != "__metadata__"]
    index = {"metadata": {"total_size": len(content)}, "weight_map": dict.fromkeys(tensors, SHARD)}
    (folder / INDEX).write_text(json.dumps(index))


def write_in_blocks(path: Path, kinds: Sequence[Kind], **changes: int) -> None:
    """Write a GGUF file whose matrices have these formats in turn."""
    tokens = byte_tokenizer(VOCAB).convert_ids_to_tokens(list(range(VOCAB)))
    tokens[-1] = tokens[64] + tokens[65]  # the only one that is merged
    tokenizer = {
        "model": "gpt2", "pre": "default", "tokens": tokens, "token_type": [int(gguf.TokenType.NORMAL)] * VOCAB,
        "merges": [f"{tokens[64]} {tokens[65]}"], "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = LlamaConfig(**LLAMA | changes)
    parameters = [(name, tensor.detach().numpy()) for name, tensor in random_model(config).named_parameters()]
    rng = np.random.default_rng(0)
    in_turn = cycle(kinds)

    def quantize(values: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
        if gguf.GGML_QUANT_SIZES[kind][0] == 1 or kind in SHORT_BLOCKS:
            return gguf.quantize(values, kind)
        scale = 1e-4 if gguf.GGML_QUANT_SIZES[kind][0] == 256 else 0.005  # long blocks have integers as scales, too
        return random_blocks(rng, kind, *values.shape, scale=scale)

    path.parent.mkdir()
    write_gguf(path, config, parameters, lambda _: next(in_turn), tokenizer, quantize=quantize)


# -- how they are spoiled ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A format of models: the ways to spoil a sound folder, by name, each with its file, and what is served of it."""

    ways: dict[str, tuple[str, Spoil]]
    model: str = "."  # the folder, or a file in it
    adapter: str | None = None  # a folder in it


def of_safetensors(file: str) -> dict[str, tuple[str, Spoil]]:
    spoils: dict[str, Spoil] = {
        "cut": cut,
        "lengthened": lengthened,
        "bytes changed": changed_bytes,
        "length replaced": lambda content, rng: extreme_number(content, rng.randrange(8), rng),
        "header edited": edited_header,
    }
    return {name: (file, spoil) for name, spoil in spoils.items()}


def of_gguf(path: Path) -> Format:
    reader = gguf.GGUFReader(path)
    places = [field.offset for field in reader.fields.values()] + [tensor.field.offset for tensor in reader.tensors]
    spoils: dict[str, Spoil] = {
        "cut": cut,
        "lengthened": lengthened,
        "bytes changed": partial(changed_bytes, end=int(reader.data_offset)),
        "numbers replaced": partial(extreme_in_gguf, places=places),
    }
    return Format({name: (path.name, spoil) for name, spoil in spoils.items()}, model=path.name)


def write_formats(sound: Path) -> dict[str, Format]:
    """Write a sound model in each format, in a folder that has the name of the format."""
    weights = of_safetensors(WEIGHTS)
    config_edited = {"config.json edited": ("config.json", edited_json)}
    quantization = partial(edited_json, part="quantization_config")
    of_quantized = Format({**weights, "config.json edited": ("config.json", quantization)})
    of_adapter = of_safetensors(f"{ADAPTER}/adapter_model.safetensors")
    of_adapter["adapter_config.json edited"] = (f"{ADAPTER}/adapter_config.json", edited_json)

    llama().save_pretrained(sound / "safetensors")
    write_with_index(sound / "JSON beside them")
    for name, packing in PACKINGS.items():
        write_checkpoint(sound / name, llama(), packing)
    write_fp8(sound / "FP8", llama(), "blocks")
    save_in_mxfp4(random_model(GptOssConfig(**GPT_OSS), dtype=torch.bfloat16), sound / "MXFP4")
    llama().save_pretrained(sound / "adapter")
    adapter = sound / "adapter" / ADAPTER
    write_adapter(adapter, adaptable(llama()), rank=4, alpha_pattern={"q_proj": 4}, use_rslora=True)
    for folder in sound.iterdir():
        byte_tokenizer(VOCAB).save_pretrained(folder)
    in_blocks = {name: sound / name / "model.gguf" for name in ("GGUF", "GGUF, other types")}
    write_in_blocks(in_blocks["GGUF"], SHORT_BLOCKS)
    write_in_blocks(in_blocks["GGUF, other types"], LONG_BLOCKS, **WIDE)
    return {
        "safetensors": Format(weights),
        "JSON beside them": Format({**config_edited, "index edited": (INDEX, edited_json)}),
        **dict.fromkeys((*PACKINGS, "FP8"), of_quantized),
        "MXFP4": Format(weights | config_edited),
        **{name: of_gguf(path) for name, path in in_blocks.items()},
        "adapter": Format(of_adapter, adapter=ADAPTER),
    }


# Shares of a format's mutations by their kind; the other kinds divide the rest.
SHARES = {"cut": 0.1, "lengthened": 0.02, "length replaced": 0.08, "index edited": 0.2}


def way(ways: Sequence[str], rng: random.Random) -> str:
    rest = (1 - sum(SHARES.get(name, 0) for name in ways)) / sum(name not in SHARES for name in ways)
    return rng.choices(ways, [SHARES.get(name, rest) for name in ways])[0]


# -- a start on each --------------------------------------------------------------------------------------------------

OUTCOMES = {"checked": "refused by the check of files", "refused": "refused later", "served": "served"}


@dataclass
class Start:
    """A start, and how it ended."""

    format: str
    way: str
    number: int
    outcome: str = ""  # one of OUTCOMES, or what is wrong
    said: str = ""
    peak_mib: float = 0.0

    @property
    def is_wrong(self) -> bool:
        return self.outcome not in OUTCOMES


def load_and_answer(config: Config, sock: socket.socket) -> int:
    """Do what the server does at its start, and answer two prompts in place of clients."""
    adapter = next(iter(config.engine.adapters), None)
    with Engine.from_pretrained(config.model, config.engine) as engine:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        answers = engine.generate([[5, 9, 3, 17], [70, 71]], params, adapter=adapter)
    assert [len(answer.token_ids) for answer in answers] == [4, 4]
    return 0


def run(model: Path, log: Path, adapter: Path | None = None) -> None:
    """Start on the model, in a process of its own, which ends here."""
    flags = FLAGS if adapter is None else (*FLAGS, "--lora", f"tuned={adapter}")
    code = 70
    try:
        with log.open("wb", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        signal.alarm(WALL_SECONDS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = cli.main(["serve", str(model), *flags], serve_app=load_and_answer)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def outcome(said: str, status: int, peak_mib: float, most_mib: float) -> str:
    """Judge how a process ended, by its log, its status as of wait, and its memory."""
    code = os.waitstatus_to_exitcode(status)
    last = said.splitlines()[-1] if said else ""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    if peak_mib > most_mib:
        return f"took {peak_mib:.0f} MiB"
    if code == 0:
        return "served"
    if code != 2:
        return f"exit code {code}"
    if not last.startswith("oaiserve: ") or "Traceback" in said or len(last) > MOST_SENTENCE:
        return "no sentence"
    if "MemoryError" in last or "allocate" in last:
        return "out of memory"
    return "checked" if "cannot be used: " in last or " has no weights: " in last else "refused"


def bare_error(said: str) -> str | None:
    """Return the error of Python that a refusal names in place of a setting, or None."""
    match = _BARE.search(said.splitlines()[-1] if said else "")
    return None if match is None else f"a bare {match[1]}"


class Starts:
    """Processes that start on a model, a few at a time."""

    def __init__(self, at_once: int, *, names_settings: bool = False) -> None:
        """With `names_settings`, a refusal that is an error of Python is wrong."""
        self._at_once = at_once
        self._names_settings = names_settings
        self._running: dict[int, tuple[Start, Path]] = {}
        self.most_mib = float("inf")
        self.ended: list[Start] = []

    def begin(self, start: Start, folder: Path, kind: Format) -> None:
        """Start on a model in `folder`, which is removed afterwards."""
        self.finish(self._at_once - 1)
        if (pid := os.fork()) == 0:
            run(folder / kind.model, folder / "log", None if kind.adapter is None else folder / kind.adapter)
        self._running[pid] = start, folder

    def finish(self, but_for: int = 0) -> None:
        """Wait until no more than `but_for` run."""
        while len(self._running) > but_for:
            pid, status, usage = os.wait3(0)
            start, folder = self._running.pop(pid)
            start.said = (folder / "log").read_text(errors="replace").strip()
            start.peak_mib = usage.ru_maxrss / 1024
            start.outcome = outcome(start.said, status, start.peak_mib, self.most_mib)
            if self._names_settings and not start.is_wrong:
                start.outcome = bare_error(start.said) or start.outcome
            self.ended.append(start)
            shutil.rmtree(folder)


def spoil_all(
    work: Path, formats: Sequence[str], seed: int, number: int, at_once: int, *, every_key: bool
) -> list[Start]:
    """Start on sound files, then on `number` broken ones of each of these formats; of all if none is given."""
    sound = work / "sound"
    starts = Starts(at_once, names_settings=every_key)
    sound.mkdir()
    kinds = {name: kind for name, kind in write_formats(sound).items() if not formats or name in formats}
    for name, kind in kinds.items():
        starts.begin(Start(name, "none", 0), shutil.copytree(sound / name, work / f"{name} sound"), kind)
    starts.finish()
    if wrong := [one for one in starts.ended if one.outcome != "served"]:
        raise SystemExit(f"the sound model is not served: {wrong[0].format}: {wrong[0].outcome}: {wrong[0].said}")
    starts.most_mib = max(one.peak_mib for one in starts.ended) + MOST_GROWTH_MIB
    for name, kind in kinds.items():
        files = [path for path in (sound / name).rglob("*config.json") if every_key]
        for path in files:
            file = str(path.relative_to(sound / name))
            for index, (what, content) in enumerate(with_other_kinds(file, path.read_bytes())):
                folder = shutil.copytree(sound / name, work / f"{name} {file} {index}".replace("/", " "))
                (folder / file).write_bytes(content)
                starts.begin(Start(name, what, index), folder, kind)
        for index in range(0 if every_key else number):
            rng = random.Random(f"{seed} {name} {index}")
            chosen = way(list(kind.ways), rng)
            file, spoil = kind.ways[chosen]
            folder = shutil.copytree(sound / name, work / f"{name} {index}")
            (folder / file).write_bytes(spoiled(spoil, (folder / file).read_bytes(), rng))
            starts.begin(Start(name, chosen, index), folder, kind)
    starts.finish()
    return starts.ended


def markdown(starts: Sequence[Start]) -> str:
    """Return a row for each format."""
    rows = [["format", "files", *OUTCOMES.values(), "wrong", "most memory, MiB"]]
    all_broken = [one for one in starts if one.way != "none"]
    for name in dict.fromkeys(one.format for one in all_broken):
        broken = [one for one in all_broken if one.format == name]
        counts = [sum(one.outcome == outcome for one in broken) for outcome in OUTCOMES]
        counts = [len(broken), *counts, sum(one.is_wrong for one in broken)]
        rows.append([name, *map("{:,}".format, counts), f"{max(one.peak_mib for one in broken):,.0f}"])
    return "\n".join(as_markdown(rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=1000, help="broken files of each format")
    parser.add_argument("--only", nargs="+", default=[], metavar="FORMAT", help="formats, as the table names them")
    parser.add_argument(
        "--every-key", action="store_true", help="replace each value of each configuration by all kinds"
    )
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # there are no threads before a fork
    for dtype in (torch.float32, torch.bfloat16):
        build(dtype)
    began = time.monotonic()
    with TemporaryDirectory() as work:
        cache = Path(work) / "cache"  # what is remembered of models that serve is lost with them
        shutil.copytree(cache_folder() / "native", cache / "native")
        os.environ["OAISERVE_CACHE"] = str(cache)
        starts = spoil_all(
            Path(work),
            arguments.only,
            arguments.seed,
            arguments.number,
            arguments.at_once,
            every_key=arguments.every_key,
        )
    seconds = time.monotonic() - began
    print(markdown(starts))
    wrong = [one for one in starts if one.is_wrong]
    print(f"{len(starts):,} starts of seed {arguments.seed} in {seconds:.0f} s, {len(wrong)} wrong")
    for one in wrong[:MOST_SHOWN]:
        print(f"{one.format} {one.number}, {one.way}: {one.outcome}: {one.said[-1500:]}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
