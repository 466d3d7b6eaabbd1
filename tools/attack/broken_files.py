"""Starts the server on broken model files, thousands of them: python -m tools.attack.broken_files --seed 1

A small model is saved as safetensors, as packed integers and as GGUF, and spoiled in many ways: bytes are changed, the
file is cut, numbers are replaced by extremes, the JSON of headers, indexes and config.json is edited. Each start is a
process of its own. It must end with one sentence and exit code 2, or the model must answer; it may not crash, hang, or
take memory or time without end. What is spoiled is a function of the seed. Prints the number of outcomes for each way
to spoil a file. The exit code is 1 if one is wrong.
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
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig

from oaiserve import cli
from oaiserve.cache import cache_folder
from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.engine.model import load, start  # noqa: F401 - imported once, for all of the processes
from oaiserve.engine.model.cpu import checked  # noqa: F401
from oaiserve.engine.model.cpu.build import build
from oaiserve.engine.model.pooling import load as pooling_load  # noqa: F401
from oaiserve.engine.request import SamplingParams
from oaiserve.model_files import INDEX
from tools.markdown import as_markdown
from tools.packed_checkpoints import Packing, write_checkpoint
from tools.random_models import byte_tokenizer, random_model

CPU_SECONDS, WALL_SECONDS = 60, 300
MEMORY_BYTES = 4 << 30  # of address space, beyond what a process has before it opens a file
MOST_GROWTH_MIB = 512  # of resident memory, beyond what the sound model takes
MOST_SENTENCE = 1000
FLAGS = ("--port", "0", "--kv-cache-memory", "1MiB", "--cpu-threads", "1", "--device", "cpu", "--log-level", "error")
MOST_SHOWN = 20

INTEGERS = "integers"  # the folder of the same model in packed integers
LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 96, 4, 2, 16, 256
EXTREMES: tuple[Any, ...] = (  # some just within what the check of files lets through
    *(0, 1, -1, 2, 255, 2**12, 2**16, 2**20, 2**24, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63),
    *(2**64 - 1, 2**64, 10**30, 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf")),
)
OTHER_KINDS: tuple[Any, ...] = (None, True, "", "x" * 300, "../../../etc/passwd", [], {}, [[]], [None], {"": {}})


# -- the sound files --------------------------------------------------------------------------------------------------


def write_folder(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=128,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = random_model(config)
    model.save_pretrained(folder)
    byte_tokenizer(VOCAB).save_pretrained(folder)
    write_checkpoint(folder / INTEGERS, model, Packing("gptq", has_act_order=True))
    byte_tokenizer(VOCAB).save_pretrained(folder / INTEGERS)


def write_gguf(path: Path) -> None:
    """Write the same shape as a GGUF file, its matrices in three formats."""
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    tokens = byte_tokenizer(VOCAB).convert_ids_to_tokens(list(range(VOCAB)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges([f"{tokens[64]} {tokens[65]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kinds = (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.F16)
    rows = {
        "attn_q": (HEADS * HEAD_DIM, WIDTH), "attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
        "attn_v": (KV_HEADS * HEAD_DIM, WIDTH), "attn_output": (WIDTH, HEADS * HEAD_DIM),
        "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
    }  # fmt: skip
    matrices = {"token_embd": (VOCAB, WIDTH), "output": (VOCAB, WIDTH)}
    norms = ["output_norm"]
    for layer in range(LAYERS):
        matrices |= {f"blk.{layer}.{name}": shape for name, shape in rows.items()}
        norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
    for index, (name, shape) in enumerate(matrices.items()):
        kind = kinds[index % len(kinds)]
        data = gguf.quants.quantize(rng.normal(0, 0.3, shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    length = int.from_bytes(content[:8], "little")
    header = edited_json(content[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def extreme_in_gguf(places: Sequence[int]) -> Spoil:
    """Return how a number of a GGUF head is replaced: near one of `places`, where its values and tensors begin."""

    def spoil(content: bytes, rng: random.Random) -> bytes:
        at = rng.choice((rng.choice(places) + rng.randrange(64), 4 + rng.randrange(20)))
        return extreme_number(content, min(at, len(content) - 8), rng)

    return spoil


@dataclass(frozen=True)
class Format:
    """A kind of file, and the ways to spoil it, by name."""

    file: str  # within the folder of the model
    model: str  # what is served: the folder, or a file in it
    ways: dict[str, Spoil]


def formats(folder: Path) -> dict[str, Format]:
    reader = gguf.GGUFReader(folder / "model.gguf")
    places = [field.offset for field in reader.fields.values()] + [tensor.field.offset for tensor in reader.tensors]
    head_end = int(reader.data_offset)

    def extreme_length(content: bytes, rng: random.Random) -> bytes:
        return extreme_number(content, rng.randrange(8), rng)

    def changed_header(content: bytes, rng: random.Random) -> bytes:
        return changed_bytes(content, rng, 8 + int.from_bytes(content[:8], "little"))

    any_file: dict[str, Spoil] = {"cut": cut, "lengthened": lengthened}
    in_safetensors = {
        "bytes changed": changed_header,
        "length replaced": extreme_length,
        "header edited": edited_header,
    }
    return {
        "safetensors": Format("model.safetensors", ".", any_file | in_safetensors),
        "integers (GPTQ)": Format(f"{INTEGERS}/model.safetensors", INTEGERS, any_file | in_safetensors),
        "GGUF": Format(
            "model.gguf",
            "model.gguf",
            any_file
            | {
                "bytes changed": lambda content, rng: changed_bytes(content, rng, head_end),
                "numbers replaced": extreme_in_gguf(places),
            },
        ),
        "JSON beside them": Format(
            "config.json", ".", {"config.json edited": edited_json, "index edited": edited_json}
        ),
        "JSON beside integers": Format(
            f"{INTEGERS}/config.json", INTEGERS, {"config.json edited": edited_quantization}
        ),
    }


# Of so many mutations, the ways get these shares; the others share what is left.
SHARES = {"cut": 0.1, "lengthened": 0.02, "length replaced": 0.08, "index edited": 0.2}


def way(ways: dict[str, Spoil], rng: random.Random) -> str:
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
    with Engine.from_pretrained(config.model, config.engine) as engine:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        answers = engine.generate([[5, 9, 3, 17], [70, 71]], params)
    assert [len(answer.token_ids) for answer in answers] == [4, 4]
    return 0


def run(model: Path, log: Path) -> None:
    """Start on the model, in a process of its own, which ends here."""
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
        code = cli.main(["serve", str(model), *FLAGS], serve_app=load_and_answer)
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

    def begin(self, format_name: str, way_name: str, number: int, folder: Path, model: str) -> None:
        """Start on a model in `folder`, which is removed afterwards."""
        while len(self._running) >= self._at_once:
            self._wait()
        if (pid := os.fork()) == 0:
            run(folder / model, folder / "log")
        self._running[pid] = format_name, way_name, number, folder

    def finish(self) -> None:
        while self._running:
            self._wait()

    def _wait(self) -> None:
        pid, status, usage = os.wait3(0)
        *names, folder = self._running.pop(pid)
        self.ended.append(ended(*names, folder / "log", status, usage.ru_maxrss / 1024, self.most_mib))
        shutil.rmtree(folder)


def spoil_all(work: Path, seed: int, number: int, at_once: int) -> list[Start]:
    """Start on sound files, then on `number` broken ones of each format."""
    sound = work / "sound"
    sound.mkdir()
    write_folder(sound)
    write_gguf(sound / "model.gguf")
    starts = Starts(work, at_once)
    found = formats(sound)
    for name, kind in found.items():  # one after the other: the first one may compile the native step
        starts.begin(name, "none", 0, shutil.copytree(sound, work / f"{name} sound"), kind.model)
        starts.finish()
    if wrong := [one for one in starts.ended if one.outcome != "served"]:
        raise SystemExit(f"the sound model is not served: {wrong[0].outcome}: {wrong[0].said}")
    starts.most_mib = max(one.peak_mib for one in starts.ended) + MOST_GROWTH_MIB
    for name, kind in found.items():
        content = (sound / kind.file).read_bytes()
        for index in range(number):
            rng = random.Random(f"{seed} {name} {index}")
            chosen = way(kind.ways, rng)
            folder = shutil.copytree(sound, work / f"{name} {index}")
            if chosen == "index edited":
                (folder / "model.safetensors").rename(folder / "1.safetensors")
                tensors = list(random_names(sound))
                index_content = json.dumps({"weight_map": dict.fromkeys(tensors, "1.safetensors")}).encode()
                (folder / INDEX).write_bytes(spoiled(kind.ways[chosen], index_content, rng))
            else:
                (folder / kind.file).write_bytes(spoiled(kind.ways[chosen], content, rng))
            starts.begin(name, chosen, index, folder, kind.model)
    starts.finish()
    return starts.ended


def random_names(sound: Path) -> list[str]:
    content = (sound / "model.safetensors").read_bytes()
    return [name for name in json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]) if name[0] != "_"]


def spoiled(spoil: Spoil, content: bytes, rng: random.Random) -> bytes:
    """Return the content with a change: some ways to spoil it may also find what is there already."""
    while (changed := spoil(content, rng)) == content:
        pass
    return changed


def markdown(starts: Sequence[Start]) -> str:
    counts: dict[tuple[str, str], Counter[str]] = {}
    for one in starts:
        outcome = "wrong" if one.is_wrong else one.outcome
        counts.setdefault((one.format, one.way), Counter())[outcome] += 1
    header = ["format", "what is spoiled", "files", *OUTCOMES.values(), "wrong", "most memory, MiB"]
    rows = []
    for (name, way_name), counter in counts.items():
        peak = max(one.peak_mib for one in starts if (one.format, one.way) == (name, way_name))
        numbers = [counter.total(), *(counter[outcome] for outcome in OUTCOMES), counter["wrong"]]
        rows.append([name, way_name, *(f"{value:,}" for value in numbers), f"{peak:,.0f}"])
    return "\n".join(as_markdown([header, *rows]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=1000, help="broken files of each format")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # there are no threads before a fork
    for dtype in (torch.float32, torch.bfloat16):
        build(dtype)
    with TemporaryDirectory() as work:
        cache = Path(work) / "cache"  # what is remembered of models that serve is lost with them
        shutil.copytree(cache_folder() / "native", cache / "native")
        os.environ["OAISERVE_CACHE"] = str(cache)
        starts = spoil_all(Path(work), arguments.seed, arguments.number, arguments.at_once)
    print(markdown(starts))
    wrong = [one for one in starts if one.is_wrong]
    print(f"{len(starts):,} starts of seed {arguments.seed}, {len(wrong)} wrong")
    for one in wrong[:MOST_SHOWN]:
        print(f"{one.format} {one.number}, {one.way}: {one.outcome}: {one.said[-1500:]}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
