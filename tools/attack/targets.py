"""The readers of files and bodies that the fuzzer gives its inputs to: what each may raise, and its inputs."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import httpcore2
import numpy as np
import torch
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
from oaiserve.errors import APIError, NotFetched, StartupError, invalid
from oaiserve.http.codings import CODINGS, Decoding
from oaiserve.http.fetch import Fetcher
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.dialects.declared import family_of_template
from oaiserve.storage import private
from oaiserve.storage.private import cache_folder
from oaiserve.storage.start_cache import NotRemembered, Subject, recall
from tests.engine.grammars.plain import make_grammars
from tests.routes.doubles import FakeEngine
from tools.attack import model_formats
from tools.attack.in_process import App
from tools.attack.inputs import (
    BOUNDARY,
    bodies,
    compressed,
    configurations,
    file_spoiled,
    forms,
    images,
    records,
    response_templates,
    schemas,
    small_adapters,
    small_gguf,
    small_tensors,
    sound_files,
    sounds,
    urls,
)
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

MAX_PIXELS = 2**20
DECODED_BYTES = 2**22
MANY = 6_000  # inputs of a run with --fixed, of spoiled bytes
FEW = 2_000  # likewise, where Hypothesis draws each edit
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


class _Hosts(httpcore2.AsyncMockBackend):
    """Hosts of which the first redirects, and the others send an image."""

    def __init__(self, location: bytes) -> None:
        redirect = b"HTTP/1.1 302 Found\r\nlocation: " + location + b"\r\ncontent-length: 0\r\n\r\n"
        image = b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\ncontent-length: 1\r\n\r\na"
        self._answers = chain([redirect], repeat(image))

    async def connect_tcp(self, host: str, port: int, *more: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
        return httpcore2.AsyncMockStream([next(self._answers)])


def read_urls(content: bytes) -> None:
    """Fetch an image by its URL, which is redirected to another one."""
    url, _, location = content.partition(b"\n")

    async def look_up(host: str, port: int) -> list[str]:
        host.encode("idna")  # raises what getaddrinfo raises before it looks anything up
        return ["93.184.215.14"]

    hosts = _Hosts(location.replace(b"\n", b" "))
    fetcher = Fetcher(["*.example", "pictures.example", "[2001:db8::1]:8000"], look_up=look_up, network=hosts)
    assert asyncio.run(fetcher.fetch(url.decode(errors="replace"), "image", 1000, lambda num_bytes: None)) == b"a"


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
    "urls": Target(lambda folder: read_urls, (NotFetched,), urls),
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
