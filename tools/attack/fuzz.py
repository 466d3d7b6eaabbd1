"""Gives spoiled files and bodies to the code that reads them, for 60 s each: python -m tools.attack.fuzz

A reader may take an input or refuse it with its own errors. Any other exception is a fault, and so is a crash of its
process, and more than 10 s of CPU time or 3 GiB. The targets named start-FORMAT start the server on a whole model with
a spoiled file: the start must end with one sentence and exit code 2, or the model must answer.

Hypothesis draws the inputs from --seed, and makes one with a fault as small as it can. With --fixed, the number of
inputs is fixed, so a run finds the same faults on every machine.

An input with a fault is written to build/fuzz. Put it into tools/attack/kept with its folder, where each run begins and
a test looks, and mend the reader. The exit code is 1 after a fault.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from io import BytesIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
import soundfile
import torch
from backports import zstd
from hypothesis import strategies as st
from safetensors.numpy import save

from oaiserve import cli
from oaiserve.checkpoints.adapters import BadAdapter, read_adapter
from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.gguf import read_head
from oaiserve.checkpoints.safetensors_header import read_header
from oaiserve.checkpoints.soundness import refuse_unless_sound
from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.engine.executors.native.build import build
from oaiserve.engine.request import Grammar, SamplingParams
from oaiserve.engine.text.response_template import read_response_template, response_form
from oaiserve.errors import APIError, StartupError, invalid
from oaiserve.http.codings import CODINGS, Decoding
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.dialects.declared import family_of_template
from oaiserve.storage import private
from oaiserve.storage.private import cache_folder
from oaiserve.storage.start_cache import NotRemembered, Subject, recall
from tests.engine.grammars.keywords import OBEYED
from tests.engine.grammars.plain import make_grammars
from tests.routes.doubles import FakeEngine
from tools.attack import model_formats, schema
from tools.attack.families import generated
from tools.attack.in_process import App
from tools.attack.media_files import plain
from tools.attack.spoils import (
    Edit,
    bytes_edited,
    header_edited,
    json_edited,
    line_edited,
    pattern_edited,
    spoiled,
    token_replaced,
)

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).parent / "kept"
SECONDS = 60.0
CPU_SECONDS = 10.0  # for one input
MEMORY_BYTES = 3 << 30  # address space, in addition to what the process has before its first input
MAX_PIXELS = 2**20
DECODED_BYTES = 2**22
BOUNDARY = "fuzzed"
MANY = 6_000  # inputs of a run with --fixed, of spoiled bytes
FEW = 2_000  # likewise, where Hypothesis draws each edit
NUM_DRAWN = 200  # inputs between two looks at the clock
MOST_SENTENCE = 1000  # characters of a refusal
FLAGS = ("--port", "0", "--kv-cache-memory", "1MiB", "--cpu-threads", "1", "--device", "cpu", "--log-level", "error")
Read = Callable[[bytes], object]


def no_seeds() -> Sequence[bytes]:
    return ()


@dataclass(frozen=True)
class Target:
    """A reader of files or bodies, what it may raise, and its inputs: spoiled ones of sound inputs, by these edits or
    else their bytes."""

    read: Callable[[Path], Read]  # gets an empty folder
    refusals: tuple[type[Exception], ...]
    sound: Callable[[], Sequence[bytes]] = no_seeds
    edits: tuple[Edit, ...] = ()
    others: st.SearchStrategy[bytes] | None = None  # inputs in place of spoiled ones
    fixed: int = 0  # inputs of a run with --fixed, if it is another number than of other targets

    @property
    def inputs(self) -> st.SearchStrategy[bytes]:
        return spoiled(self.sound, *self.edits) if self.others is None else self.others

    @property
    def num_fixed(self) -> int:
        return self.fixed or (FEW if self.edits else MANY)


# -- inputs -----------------------------------------------------------------------------------------------------------


def small_tensors() -> list[bytes]:
    arrays = {f"model.layers.{layer}.{name}.weight": np.ones((4, 8), np.float32) for layer in (0, 1) for name in "qk"}
    return [save(arrays), save({"a": np.zeros(0, np.float16)}, {"format": "pt"})]


def small_adapters() -> list[bytes]:
    """Return configurations of adapters; all have the same weights."""
    sound = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    more = {"rank_pattern": {"0.q_proj": 2, "^model.*k": 4}, "alpha_pattern": {"q_proj": 4}, "use_rslora": True}
    return [json.dumps(sound).encode(), json.dumps(sound | more).encode()]


@cache
def small_gguf() -> list[bytes]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "small.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_head_count(2)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b", "ab"])
        writer.add_token_types([1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_tensor("token_embd.weight", np.ones((3, 8), np.float32))
        writer.add_tensor("blk.0.attn_q.weight", np.ones((8, 8), np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return [path.read_bytes()]


def configurations() -> list[bytes]:
    sound = model_formats.LLAMA | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "dynamic": {"-:.*k_proj": {}}}
    return [json.dumps(sound).encode(), json.dumps(sound | {"quantization_config": quantized}).encode()]


def response_templates() -> list[bytes]:
    """Return declarations of answers: calls in tags, and in JSON."""
    pattern = r"<\|call\|>(?P<name>\w+)\n"
    arguments = {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</>"}
    call = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    tagged = {"open_pattern": pattern, "close": "</c>", "content": "xml-inline", "content_args": arguments}
    in_json = {"open": ["<c>", "<t>"], "close": "</c>", "content": "json"}
    thoughts = {"open_pattern": r"<\|think(?:ing)?\|>", "close": "</t>"}
    return [
        json.dumps(
            {"start_anchor": "a", "fields": {"thinking": thoughts, "tool_calls": field | {"transform": call}}}
        ).encode()
        for field in (tagged, in_json)
    ]


def images() -> list[bytes]:
    from oaiserve.plugins.media.model import image_process

    forms = [plain(form, side=9) for form in image_process.FORMATS]
    return [*forms, plain("PNG", "P", side=9), plain("GIF", "L", side=9), plain("WEBP", "RGBA", side=9)]


def sounds() -> list[bytes]:
    files = []
    for form, subtype in (("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("MP3", "MPEG_LAYER_III")):
        file = BytesIO()
        soundfile.write(file, np.sin(np.arange(4000, dtype=np.float32) / 9), 8000, format=form, subtype=subtype)
        content = file.getvalue()
        peak = content.find(b"PEAK")
        if peak >= 0:  # a chunk with the time of writing
            content = content[: peak + 12] + bytes(4) + content[peak + 16 :]
        files.append(content)
    return files


def compressed() -> list[bytes]:
    """Return bodies with the number of their coding before them."""
    body = b'{"prompt": "Hi"}' * 50
    coded = {"zstd": zstd.compress(body), "gzip": gzip.compress(body, mtime=0), "deflate": zlib.compress(body)}
    return [bytes([CODINGS.index(name)]) + content for name, content in coded.items()]


def forms() -> list[bytes]:
    def field(name: str, content: bytes, more: str = "") -> bytes:
        return (
            f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"
        )

    purpose = field("purpose", b"batch")
    end = f"--{BOUNDARY}--\r\n".encode()
    file = field("file", b'{"custom_id": "1"}\n', "; filename=\"a%22.jsonl\"; filename*=UTF-8''%c3%a9.jsonl")
    return [purpose + file + end, file + purpose + field("expires_after[seconds]", b"3600") + end]


def records() -> list[bytes]:
    """Return a record of a start without files, but for the digest at its end."""
    head = {"format": 2, "folder": "/models/a", "day": "2026-12-03", "versions": {}, "files": {}}
    more = {"warnings": [["a", 30, "b"]], "data": {"dtype": "float32"}}
    return [json.dumps(head | more).encode() + b"\n" + bytes(64)]


def schemas() -> list[bytes]:
    return [json.dumps(row.schema).encode() for row in OBEYED]


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Return a path with a body: a line of JSON, and the rest."""
    path = draw(st.sampled_from(sorted(generated.bodies())))
    content = draw(generated.contents(path))
    if draw(st.integers(0, 3)) == 0:
        content = token_replaced(draw, content)
    return json.dumps(path).encode() + b"\n" + content


@cache
def sound_files(name: str) -> list[bytes]:
    """Return the files of a model in a format that are spoiled, each with its path before it."""
    with TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model_formats.write(name, model)
        return [path.encode() + b"\n" + (model / path).read_bytes() for path in model_formats.FORMATS[name][1]]


def file_spoiled(draw: st.DrawFn, content: bytes) -> bytes:
    """Spoil a file behind its path, by its kind."""
    path, line_end, file = content.partition(b"\n")
    of_kind = {".json": [json_edited], ".safetensors": [header_edited, bytes_edited]}
    edit = draw(st.sampled_from(of_kind.get(Path(path.decode()).suffix, [bytes_edited])))
    return path + line_end + edit(draw, file)


# -- readers ----------------------------------------------------------------------------------------------------------


def reader_of_files(name: str, read: Callable[[Path], object]) -> Callable[[Path], Read]:
    """Return a reader that finds each input in a new file, as some readers remember files."""

    def begin(folder: Path) -> Read:
        numbers = count()

        def read_content(content: bytes) -> None:
            path = folder / f"{next(numbers)}" / name
            path.parent.mkdir()
            path.write_bytes(content)
            read(path)
            path.unlink()

        return read_content

    return begin


def read_gguf(path: Path) -> None:
    read_head(path).read_tokenizer()


def read_configuration(path: Path) -> None:
    (path.parent / "model.safetensors").write_bytes(save({name: np.zeros((256, 64), np.float32) for name in "abc"}))
    refuse_unless_sound(ModelSource(str(path.parent), None, is_local=True))


def read_answers(path: Path) -> None:
    """Read a declaration of answers, and by it a text that slow expressions take long for."""
    parser = family_of_template(response_form(read_response_template(path))).parser({}, only_one=False)
    parser.push("<|call|>" + "ab<c>" * 500)
    parser.finish(is_cut=False)


def read_adapter_of(path: Path) -> None:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    weights = {f"{prefix}A.weight": np.ones((4, 8), np.float32), f"{prefix}B.weight": np.ones((8, 4), np.float32)}
    (path.parent / "adapter_model.safetensors").write_bytes(save(weights))
    read_adapter(path.parent)


def read_images(folder: Path) -> Read:
    from oaiserve.plugins.media.model import image_process

    def read(content: bytes) -> None:
        try:
            image_process.decoded(image_process.opened(content, MAX_PIXELS), on_white=True, is_low=True)
        except Exception as error:  # Decoders raise errors of any type, so the process turns all into a sentence.
            image_process.reason_of(error, MAX_PIXELS)

    return read


def read_sounds(folder: Path) -> Read:
    from oaiserve.plugins.media.model import sound_process
    from oaiserve.plugins.shared.decoding_process import Refused

    def read(content: bytes) -> None:
        try:
            assert np.isfinite(sound_process.samples_of(content, 16_000, 30.0)).all()
        except Refused as error:
            raise invalid("messages", f"the sound {error}") from error

    return read


def read_compressed(content: bytes) -> None:
    decoding = Decoding([CODINGS[content[0] % len(CODINGS)]] if content else ["gzip"], DECODED_BYTES)
    assert sum(map(len, [*decoding.feed(content[1:]), *decoding.end()])) <= DECODED_BYTES


def read_forms(folder: Path) -> Read:
    from oaiserve.plugins.batches.form import UploadForm

    def read(content: bytes) -> None:
        form = UploadForm(f"multipart/form-data; boundary={BOUNDARY}", BytesIO())
        for start in range(0, len(content), 100):
            form.feed(content[start : start + 100])
        form.end(Adaptations())

    return read


def read_records(folder: Path) -> Read:
    private.make_folder(folder / "remembered")
    path = folder / "remembered" / "start-1"
    subject = Subject("start", folder, {}, {}, {}, folder, path)

    def read(content: bytes) -> None:
        private.write_file(path, content + hashlib.sha256(content).digest())
        recall(subject)

    return read


def read_schema(folder: Path) -> Read:
    grammars = make_grammars()
    return lambda content: grammars.compile(Grammar("json_schema", content.decode()))


def read_body(folder: Path) -> Read:
    app = App(FakeEngine())

    def send(content: bytes) -> None:
        path, _, body = content.partition(b"\n")
        answer = app.post(json.loads(path), body)
        assert answer.status_code < 500, f"answered {answer.status_code}: {answer.text[:300]}"

    return send


def start_on(name: str) -> Callable[[Path], Read]:
    """Return a reader that starts the server on a model of a format, in place of one of whose files it gets another."""

    def begin(folder: Path) -> Read:
        torch.set_num_threads(1)
        for dtype in (torch.float32, torch.bfloat16):
            build(dtype)
        cache = folder / "cache"  # what is remembered of models that serve is lost with them
        shutil.copytree(cache_folder() / "native", cache / "native")
        os.environ["OAISERVE_CACHE"] = str(cache)
        model_formats.write(name, folder / "sound")
        served = model_formats.GGUF if name.startswith("GGUF") else "."
        numbers = count()

        def start(content: bytes) -> None:
            path, _, file = content.partition(b"\n")
            model = folder / f"{next(numbers)}"
            shutil.copytree(folder / "sound", model)
            (model / path.decode()).write_bytes(file)
            flags = ("--lora", f"tuned={model / model_formats.ADAPTER}") if name == "adapter" else ()
            said = io.StringIO()
            with redirect_stdout(said), redirect_stderr(said):
                code = cli.main(["serve", str(model / served), *FLAGS, *flags], serve_app=load_and_answer)
            shutil.rmtree(model)
            assert code in (0, 2), f"exit code {code}: {said.getvalue()}"
            assert code == 0 or is_a_sentence(said.getvalue()), f"no sentence: {said.getvalue()}"

        return start

    return begin


def load_and_answer(config: Config, sock: socket.socket) -> int:
    """Do what the server does at its start, and answer two prompts in place of clients."""
    adapter = next(iter(config.engine.adapters), None)
    with Engine.from_pretrained(config.model, config.engine) as engine:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        answers = engine.generate([[5, 9, 3, 17], [70, 71]], params, adapter=adapter)
    assert [len(answer.token_ids) for answer in answers] == [4, 4]
    return 0


def is_a_sentence(said: str) -> bool:
    """Return whether a refused start says why in one sentence, which is not that it took too much memory."""
    last = said.strip().splitlines()[-1] if said.strip() else ""
    is_memory = "MemoryError" in last or "allocate" in last
    return last.startswith("oaiserve: ") and "Traceback" not in said and len(last) <= MOST_SENTENCE and not is_memory


EDITS_OF_JSON = (json_edited, token_replaced, bytes_edited)
READ_TENSORS = reader_of_files("model.safetensors", read_header)
READ_CONFIGURATION = reader_of_files("config.json", read_configuration)
READ_ANSWERS = reader_of_files("template.json", read_answers)
READ_ADAPTER = reader_of_files("adapter_config.json", read_adapter_of)
TARGETS = {
    "safetensors": Target(READ_TENSORS, (BadFile,), small_tensors, (bytes_edited, header_edited)),
    "gguf": Target(reader_of_files("model.gguf", read_gguf), (BadFile,), small_gguf),
    "configurations": Target(READ_CONFIGURATION, (StartupError,), configurations, EDITS_OF_JSON),
    "adapters": Target(READ_ADAPTER, (BadAdapter,), small_adapters, (json_edited, pattern_edited, *EDITS_OF_JSON)),
    "response_templates": Target(READ_ANSWERS, (StartupError,), response_templates, (pattern_edited, *EDITS_OF_JSON)),
    "records": Target(read_records, (NotRemembered,), records, (line_edited, token_replaced, bytes_edited)),
    "codings": Target(lambda folder: read_compressed, (APIError,), compressed),
    "schemas": Target(read_schema, (APIError, UnicodeDecodeError), schemas, EDITS_OF_JSON[:2]),
    "bodies": Target(read_body, (), others=bodies(), fixed=500),
    **{
        f"start-{name}": Target(start_on(name), (), partial(sound_files, name), (file_spoiled,), fixed=4)
        for name in model_formats.FORMATS
    },
}
if find_spec("oaiserve.plugins.batches") is not None:
    TARGETS["forms"] = Target(read_forms, (APIError,), forms)
if find_spec("oaiserve.plugins.media") is not None:
    TARGETS["images"] = Target(read_images, (), images)
    TARGETS["sounds"] = Target(read_sounds, (APIError,), sounds)


# -- runs -------------------------------------------------------------------------------------------------------------


def kept(name: str) -> list[Path]:
    return sorted((KEPT / name).glob("*"))


def check(target: Target, read: Read, content: bytes) -> None:
    """Give an input to a reader. Raises whatever is no refusal, and ends the process if it takes too long."""
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        read(content)
    except target.refusals:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def fuzz(name: str, seed: int, seconds: float | None, into: Path) -> None:
    """Run a target in this process, which ends here: with status 1 after a fault, or by a signal. The last input stays
    in the folder then, after an error the smallest one. Without a time, the number of inputs is fixed."""
    target = TARGETS[name]
    numbers = count()
    try:
        warnings.simplefilter("ignore")  # Decoders warn of each fault in a file, also on the standard error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        last = into / f"{seed}"
        with TemporaryDirectory() as folder:
            read = target.read(Path(folder))
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))

            def give(content: bytes) -> None:
                next(numbers)
                last.write_bytes(content)
                check(target, read, content)

            for content in [*(path.read_bytes() for path in kept(name)), *target.sound()]:
                give(content)
            until = time.monotonic() + (seconds or 0.0)
            for turn in count():
                of_turn = min(target.num_fixed, NUM_DRAWN) if seconds is not None else target.num_fixed
                schema.for_each(give, target.inputs, from_seed=1000 * seed + turn, number=of_turn)
                if time.monotonic() > until:
                    break
            last.unlink()
    except BaseException:
        print(f"{name}: a fault after {next(numbers)} inputs\n{traceback.format_exc()}", flush=True)
        os._exit(1)
    print(f"{name}: {next(numbers):,} inputs", flush=True)
    os._exit(0)


def run_all(names: Sequence[str], seed: int, seconds: float | None, at_once: int, into: Path) -> list[str]:
    """Run targets in processes of their own. Return those with faults, and how they ended."""
    running: dict[int, str] = {}
    faults = []
    waiting = [*names]
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            (into / name).mkdir(parents=True, exist_ok=True)
            if (pid := os.fork()) == 0:
                fuzz(name, seed, seconds, into / name)
            running[pid] = name
        pid, status = os.wait()
        name = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else "raised an error"
            faults.append(f"{name}: {how} on {into / name / str(seed)}")
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--seconds", type=float, default=SECONDS, help=f"for each target (default: {SECONDS:g})")
    extent.add_argument("--fixed", action="store_true", help="a fixed number of inputs for each target instead")
    parser.add_argument("--only", action="append", choices=TARGETS, help="a target; repeatable")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--into", type=Path, default=ROOT / "build/fuzz", help="a folder for inputs with a fault")
    arguments = parser.parse_args(argv)
    names = arguments.only or [*TARGETS]
    seconds = None if arguments.fixed else arguments.seconds
    faults = run_all(names, arguments.seed, seconds, arguments.at_once, arguments.into)
    print(*faults, sep="\n", end="\n" if faults else "")
    print(f"{len(faults)} of {len(names)} targets of seed {arguments.seed} have a fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
