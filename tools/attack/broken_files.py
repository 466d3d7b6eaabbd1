"""Starts the server on broken model files, thousands of them: python -m tools.attack.broken_files --seed 1

A small model is saved in each format that is read: safetensors, packed integers, FP8, MXFP4 and GGUF, and so is an
adapter.
The files are spoiled in many ways: bytes are changed, the file is cut, numbers are replaced by extremes, the JSON of
headers, indexes and configurations is edited. Each start is a process of its own. It must end with one sentence and
exit code 2, or the model must answer; it may not crash, hang, or take memory or time without end. What is spoiled is a
function of the seed. Prints the number of outcomes for each way to spoil a file. The exit code is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import GptOssConfig, LlamaConfig, PreTrainedConfig

from oaiserve import cli
from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.engine.model import adapters  # noqa: F401 - imported once, for all processes
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.cpu.build import build
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.start import cache as checked  # noqa: F401
from oaiserve.engine.start.ways import expanded, pooling, quantized  # noqa: F401
from oaiserve.files.checkpoint import INDEX
from oaiserve.files.private import cache_folder
from tests.models.adapters import write_adapter
from tests.models.decoders import byte_tokenizer, random_model
from tests.models.gguf_files import random_blocks, write_gguf
from tests.models.packed import Packing, save_in_mxfp4, write_checkpoint, write_fp8
from tools.markdown import as_markdown, publish

CPU_SECONDS, WALL_SECONDS = 60, 300
MEMORY_BYTES = 4 << 30  # of address space, beyond what a process has before it opens a file
MOST_GROWTH_MIB = 512  # of resident memory, beyond what the sound model takes
MOST_SENTENCE = 1000
FLAGS = ("--port", "0", "--kv-cache-memory", "1MiB", "--cpu-threads", "1", "--device", "cpu", "--log-level", "error")
MOST_SHOWN = 20

ADAPTER, SHARD = "adapter", "model-00001-of-00001.safetensors"
VOCAB = 256
EXTREMES: tuple[Any, ...] = (  # some just within what the check of files lets through
    *(0, 1, -1, 2, 255, 2**12, 2**16, 2**20, 2**24, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63),
    *(2**64 - 1, 2**64, 10**30, 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf")),
)
OTHER_KINDS: tuple[Any, ...] = (None, True, "", "x" * 300, "../../../etc/passwd", [], {}, [[]], [None], {"": {}})


# -- the sound files --------------------------------------------------------------------------------------------------

_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # as wide as the longest blocks
_GPT_OSS = _LLAMA | {
    "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_PACKINGS = {
    "GPTQ": Packing("gptq", has_act_order=True),
    "AWQ": Packing("awq"),
    "compressed-tensors": Packing("pack-quantized"),
}
# The formats that the matrices of a GGUF file have in turn.
_SHORT_BLOCKS = (Kind.Q8_0, Kind.Q4_0, Kind.F16)
_LONG_BLOCKS = (
    *(Kind.Q4_K, Kind.Q6_K, Kind.Q5_K, Kind.IQ4_XS, Kind.Q2_K, Kind.Q3_K),
    *(Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.IQ4_NL, Kind.BF16),
)


def write_safetensors(folder: Path) -> None:
    random_model(LlamaConfig(**_LLAMA)).save_pretrained(folder)
    byte_tokenizer(VOCAB).save_pretrained(folder)


def write_with_index(folder: Path) -> None:
    """Write the same model with an index, as models have it whose weights are in several files."""
    write_safetensors(folder)
    (folder / "model.safetensors").rename(folder / SHARD)
    content = (folder / SHARD).read_bytes()
    tensors = [name for name in header_of(content) if name != "__metadata__"]
    index = {"metadata": {"total_size": len(content)}, "weight_map": dict.fromkeys(tensors, SHARD)}
    (folder / INDEX).write_text(json.dumps(index))


def write_packed(folder: Path, packing: Packing) -> None:
    write_checkpoint(folder, random_model(LlamaConfig(**_LLAMA)), packing)
    byte_tokenizer(VOCAB).save_pretrained(folder)


def write_in_fp8(folder: Path) -> None:
    write_fp8(folder, random_model(LlamaConfig(**_LLAMA)), "blocks")
    byte_tokenizer(VOCAB).save_pretrained(folder)


def write_mxfp4(folder: Path) -> None:
    save_in_mxfp4(random_model(GptOssConfig(**_GPT_OSS), dtype=torch.bfloat16), folder)
    byte_tokenizer(VOCAB).save_pretrained(folder)


def write_in_blocks(folder: Path, config: PreTrainedConfig, kinds: Sequence[Kind]) -> None:
    """Write a GGUF file whose matrices have these formats in turn."""
    tokens = byte_tokenizer(VOCAB).convert_ids_to_tokens(list(range(VOCAB)))
    tokens[-1] = tokens[64] + tokens[65]  # the only one that is merged
    tokenizer = {
        "model": "gpt2", "pre": "default", "tokens": tokens, "token_type": [int(gguf.TokenType.NORMAL)] * VOCAB,
        "merges": [f"{tokens[64]} {tokens[65]}"], "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    parameters = [(name, tensor.detach().numpy()) for name, tensor in random_model(config).named_parameters()]
    rng, in_turn = np.random.default_rng(0), cycle(kinds)

    def quantize(values: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
        if gguf.GGML_QUANT_SIZES[kind][0] == 1 or kind in _SHORT_BLOCKS:
            return gguf.quantize(values, kind)
        scale = 1e-4 if gguf.GGML_QUANT_SIZES[kind][0] == 256 else 0.005  # long blocks have integers as scales, too
        return random_blocks(rng, kind, *values.shape, scale=scale)

    folder.mkdir()
    write_gguf(folder / "model.gguf", config, parameters, lambda _: next(in_turn), tokenizer, quantize=quantize)


def write_adapted(folder: Path) -> None:
    """Write the model, and an adapter for all its linear layers."""
    write_safetensors(folder)
    shapes = adaptable(random_model(LlamaConfig(**_LLAMA)))
    write_adapter(folder / ADAPTER, shapes, rank=4, alpha_pattern={"q_proj": 4}, use_rslora=True)


def header_of(content: bytes) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header


# -- how they are spoiled ---------------------------------------------------------------------------------------------

Spoil = Callable[[bytes, random.Random], bytes]


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.choice((rng.randrange(64), rng.randrange(len(content)), len(content) - 1))]


def lengthened(content: bytes, rng: random.Random) -> bytes:
    return content + rng.randbytes(rng.choice((1, 8, 4096)))


def changed_bytes(content: bytes, rng: random.Random, end: int) -> bytes:
    """Change a few bytes, of the first `end` ones in three of four cases."""
    spoiled = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at = rng.randrange(end if rng.randrange(4) else len(spoiled))
        spoiled[at] = rng.choice((0, 255, spoiled[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(spoiled)


def extreme_number(content: bytes, at: int, rng: random.Random) -> bytes:
    """Write an extreme number at a place, in a random width."""
    form = rng.choice("bBhHiIqQ")
    bits = 8 * struct.calcsize(form)
    number = rng.choice(
        (0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 2 ** (bits // 2), rng.getrandbits(bits))
    )
    written = number.to_bytes(bits // 8, "little")
    return content[:at] + written + content[at + len(written) :]


def edited(tree: Any, rng: random.Random) -> Any:
    """Return a copy of what JSON holds, with one to three changes somewhere."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        parents = [node for node in _nodes(tree) if isinstance(node, dict | list) and node]
        if not parents:
            return copy.deepcopy(rng.choice(OTHER_KINDS))
        parent = rng.choice(parents)
        places = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        place, other = rng.choice(places), rng.choice(places)
        match rng.randrange(8):
            case 0:
                del parent[place]
            case 1:
                parent[place] = copy.deepcopy(rng.choice(OTHER_KINDS))
            case 2:
                parent[place], parent[other] = parent[other], parent[place]
            case 3:
                parent[place] = copy.deepcopy(parent[other])
            case 4 if isinstance(parent, dict):
                parent[rng.choice(("", "x" * 300, f"{place}x", "model.\0"))] = parent.pop(place)
            case 5 if isinstance(parent[place], int) and not isinstance(parent[place], bool):
                parent[place] += rng.choice((-1, 1, 4, 16, 2**32))
            case _:
                parent[place] = rng.choice(EXTREMES)
    return tree


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    if isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from _nodes(child)


def edited_json(content: bytes, rng: random.Random) -> bytes:
    return json.dumps(edited(json.loads(content), rng)).encode()


def edited_quantization(content: bytes, rng: random.Random) -> bytes:
    config = json.loads(content)
    return json.dumps(config | {"quantization_config": edited(config["quantization_config"], rng)}).encode()


def edited_header(content: bytes, rng: random.Random) -> bytes:
    data = content[8 + int.from_bytes(content[:8], "little") :]
    header = json.dumps(edited(header_of(content), rng)).encode()
    return struct.pack("<Q", len(header)) + header + data


def extreme_in_gguf(places: Sequence[int]) -> Spoil:
    """Return how a number of a GGUF head is replaced: near one of `places`, where its values and tensors begin."""

    def spoil(content: bytes, rng: random.Random) -> bytes:
        at = rng.choice((rng.choice(places) + rng.randrange(64), 4 + rng.randrange(20)))
        return extreme_number(content, min(at, len(content) - 8), rng)

    return spoil


def changed_header(content: bytes, rng: random.Random) -> bytes:
    return changed_bytes(content, rng, 8 + int.from_bytes(content[:8], "little"))


def extreme_length(content: bytes, rng: random.Random) -> bytes:
    return extreme_number(content, rng.randrange(8), rng)


@dataclass(frozen=True)
class Way:
    """A way to spoil a file of a model."""

    file: str  # within the model's folder
    spoil: Spoil


@dataclass(frozen=True)
class Format:
    """A format of models: what is served of a sound folder, and the ways to spoil that, by name."""

    ways: dict[str, Way]
    model: str = "."  # the folder, or a file in it
    adapter: str | None = None  # a folder in it


_ANY_FILE: dict[str, Spoil] = {"cut": cut, "lengthened": lengthened}
_SAFETENSORS = _ANY_FILE | {
    "bytes changed": changed_header,
    "length replaced": extreme_length,
    "header edited": edited_header,
}
_CONFIG_EDITED = {"config.json edited": Way("config.json", edited_json)}


def of_file(file: str, ways: dict[str, Spoil]) -> dict[str, Way]:
    return {name: Way(file, spoil) for name, spoil in ways.items()}


def of_gguf(file: Path) -> Format:
    reader = gguf.GGUFReader(file)
    places = [field.offset for field in reader.fields.values()] + [tensor.field.offset for tensor in reader.tensors]
    head_end = int(reader.data_offset)

    def changed_head(content: bytes, rng: random.Random) -> bytes:
        return changed_bytes(content, rng, head_end)

    ways = _ANY_FILE | {"bytes changed": changed_head, "numbers replaced": extreme_in_gguf(places)}
    return Format(of_file(file.name, ways), model=file.name)


def write_formats(sound: Path) -> dict[str, Format]:
    """Write a sound model in each format, in a folder that has the name of the format."""
    weights = of_file("model.safetensors", _SAFETENSORS)
    found = {
        "safetensors": Format(weights),
        "JSON beside them": Format({**_CONFIG_EDITED, "index edited": Way(INDEX, edited_json)}),
    }
    write_safetensors(sound / "safetensors")
    write_with_index(sound / "JSON beside them")
    for name, packing in _PACKINGS.items():
        write_packed(sound / name, packing)
        found[name] = Format({**weights, "config.json edited": Way("config.json", edited_quantization)})
    write_in_fp8(sound / "FP8")
    found["FP8"] = Format({**weights, "config.json edited": Way("config.json", edited_quantization)})
    write_mxfp4(sound / "MXFP4")
    found["MXFP4"] = Format(weights | _CONFIG_EDITED)
    write_in_blocks(sound / "GGUF", LlamaConfig(**_LLAMA), _SHORT_BLOCKS)
    write_in_blocks(sound / "GGUF, other types", LlamaConfig(**_LLAMA | _WIDE), _LONG_BLOCKS)
    for name in ("GGUF", "GGUF, other types"):
        found[name] = of_gguf(sound / name / "model.gguf")
    write_adapted(sound / "adapter")
    of_adapter = of_file(f"{ADAPTER}/adapter_model.safetensors", _SAFETENSORS)
    config = Way(f"{ADAPTER}/adapter_config.json", edited_json)
    found["adapter"] = Format({**of_adapter, "adapter_config.json edited": config}, adapter=ADAPTER)
    return found


# Of the mutations of a format, the ways get these shares; the others share what is left.
SHARES = {"cut": 0.1, "lengthened": 0.02, "length replaced": 0.08, "index edited": 0.2}


def way(ways: dict[str, Way], rng: random.Random) -> str:
    rest = (1 - sum(SHARES.get(name, 0) for name in ways)) / sum(name not in SHARES for name in ways)
    return rng.choices(list(ways), [SHARES.get(name, rest) for name in ways])[0]


# -- a start on each --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """How a start ended."""

    format: str
    way: str
    number: int
    outcome: str  # "checked", "refused", "served", or what is wrong
    said: str
    peak_mib: float

    @property
    def is_wrong(self) -> bool:
        return self.outcome not in OUTCOMES


OUTCOMES = {"checked": "refused by the check of files", "refused": "refused later", "served": "served"}


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


def ended(
    format_name: str, way_name: str, number: int, log: Path, status: int, peak_mib: float, most_mib: float
) -> Start:
    """Judge how a process ended."""
    said = log.read_text(errors="replace").strip()
    code = os.waitstatus_to_exitcode(status)
    last = said.splitlines()[-1] if said else ""
    if code < 0:
        outcome = f"ended by {signal.Signals(-code).name}"
    elif peak_mib > most_mib:
        outcome = f"took {peak_mib:.0f} MiB"
    elif code == 0:
        outcome = "served"
    elif code != 2:
        outcome = f"exit code {code}"
    elif not last.startswith("oaiserve: ") or "Traceback" in said or len(last) > MOST_SENTENCE:
        outcome = "no sentence"
    elif "MemoryError" in last or "allocate" in last:
        outcome = "out of memory"
    else:
        outcome = "checked" if "cannot be used: " in last or " has no weights: " in last else "refused"
    return Start(format_name, way_name, number, outcome, said, peak_mib)


class Starts:
    """Processes that start on a model, a few at a time."""

    def __init__(self, work: Path, at_once: int) -> None:
        self._work, self._at_once = work, at_once
        self._running: dict[int, tuple[str, str, int, Path]] = {}
        self.most_mib = float("inf")
        self.ended: list[Start] = []

    def begin(self, format_name: str, way_name: str, number: int, folder: Path, kind: Format) -> None:
        """Start on a model in `folder`, which is removed afterwards."""
        while len(self._running) >= self._at_once:
            self._wait()
        if (pid := os.fork()) == 0:
            run(folder / kind.model, folder / "log", None if kind.adapter is None else folder / kind.adapter)
        self._running[pid] = format_name, way_name, number, folder

    def finish(self) -> None:
        while self._running:
            self._wait()

    def _wait(self) -> None:
        pid, status, usage = os.wait3(0)
        *names, folder = self._running.pop(pid)
        self.ended.append(ended(*names, folder / "log", status, usage.ru_maxrss / 1024, self.most_mib))
        shutil.rmtree(folder)


def spoil_all(work: Path, formats: Sequence[str], seed: int, number: int, at_once: int) -> list[Start]:
    """Start on sound files, then on `number` broken ones of each of these formats; of all if none is given."""
    sound = work / "sound"
    sound.mkdir()
    starts = Starts(work, at_once)
    found = {name: kind for name, kind in write_formats(sound).items() if not formats or name in formats}
    for name, kind in found.items():
        starts.begin(name, "none", 0, shutil.copytree(sound / name, work / f"{name} sound"), kind)
    starts.finish()
    if wrong := [one for one in starts.ended if one.outcome != "served"]:
        raise SystemExit(f"the sound model is not served: {wrong[0].format}: {wrong[0].outcome}: {wrong[0].said}")
    starts.most_mib = max(one.peak_mib for one in starts.ended) + MOST_GROWTH_MIB
    for name, kind in found.items():
        for index in range(number):
            rng = random.Random(f"{seed} {name} {index}")
            chosen = way(kind.ways, rng)
            folder = shutil.copytree(sound / name, work / f"{name} {index}")
            path = folder / kind.ways[chosen].file
            path.write_bytes(spoiled(kind.ways[chosen].spoil, path.read_bytes(), rng))
            starts.begin(name, chosen, index, folder, kind)
    starts.finish()
    return starts.ended


def spoiled(spoil: Spoil, content: bytes, rng: random.Random) -> bytes:
    """Return the content with a change: some ways to spoil it may also find what is there already."""
    while (changed := spoil(content, rng)) == content:
        pass
    return changed


def markdown(starts: Sequence[Start]) -> str:
    """Return a row for each format."""
    counts: dict[str, Counter[str]] = {}
    for one in starts:
        if one.way != "none":
            counts.setdefault(one.format, Counter())["wrong" if one.is_wrong else one.outcome] += 1
    header = ["format", "files", *OUTCOMES.values(), "wrong", "most memory, MiB"]
    rows = []
    for name, counter in counts.items():
        peak = max(one.peak_mib for one in starts if one.format == name and one.way != "none")
        numbers = [counter.total(), *(counter[outcome] for outcome in OUTCOMES), counter["wrong"]]
        rows.append([name, *(f"{value:,}" for value in numbers), f"{peak:,.0f}"])
    return "\n".join(as_markdown([header, *rows]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=1000, help="broken files of each format")
    parser.add_argument("--only", nargs="+", default=[], metavar="FORMAT", help="formats, as the table names them")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="where to write how each start ended")
    parser.add_argument("--markdown", type=Path, help="the page whose table is replaced")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # there are no threads before a fork
    for dtype in (torch.float32, torch.bfloat16):
        build(dtype)
    build(torch.bfloat16, "blocks")
    began = time.monotonic()
    with TemporaryDirectory() as work:
        cache = Path(work) / "cache"  # what is remembered of models that serve is lost with them
        shutil.copytree(cache_folder() / "native", cache / "native")
        os.environ["OAISERVE_CACHE"] = str(cache)
        starts = spoil_all(Path(work), arguments.only, arguments.seed, arguments.number, arguments.at_once)
    seconds = time.monotonic() - began
    ends = [[one.format, one.way, one.number, one.outcome, round(one.peak_mib)] for one in starts]
    publish(arguments, "broken files", {"seed": arguments.seed, "starts": ends}, markdown(starts))
    wrong = [one for one in starts if one.is_wrong]
    print(f"{len(starts):,} starts of seed {arguments.seed} in {seconds:.0f} s, {len(wrong)} wrong")
    for one in wrong[:MOST_SHOWN]:
        print(f"{one.format} {one.number}, {one.way}: {one.outcome}: {one.said[-1500:]}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
