"""Starts an engine of another kind, as its documentation advises, and the gateway in front of it.

The engine has a small model with random weights and the demo model's tokenizer, so that its own time hardly counts.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer

from oaiserve.checkpoints import demo
from tests.models.decoders import random_model
from tests.models.gguf_files import write_gguf
from tests.models.gguf_records import parameters_of
from tests.models.small_configs import config_of
from tools.bench import prepare
from tools.bench.servers import START_LIMIT_SECONDS, ServerSpec, installed_version, llama_cpp, vllm
from tools.server_process import CHAT, QUESTION, ServerProcess, free_port, running_process

SLOTS = 32  # Requests that llama.cpp computes at once.
# On a busy machine, several threads wait for each other most of the time.
THREADS = "1"


def small_model(folder: Path) -> Path:
    """Save a model with its tokenizer in this folder, and return the folder."""
    for file in demo.fetched().iterdir():
        if not file.name.startswith(("config", "model")):
            shutil.copy(file, folder)
    vocab_size = AutoTokenizer.from_pretrained(folder).vocab_size
    model = random_model(config_of("llama", vocab_size=vocab_size, max_position_embeddings=2048, head_dim=64))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def as_gguf(folder: Path) -> Path:
    """Write the model of a folder as the file that llama.cpp reads, and return its path."""
    fields = {
        name.removeprefix("tokenizer.ggml.").removeprefix("tokenizer."): field.contents()
        for name, field in gguf.GGUFReader(prepare.gguf()).fields.items()
        if name.startswith("tokenizer.")
    }
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    path = folder / "model.gguf"
    write_gguf(path, model.config, parameters_of(model).items(), lambda _: Kind.BF16, fields)
    return path


def transformers_serve(model: Path) -> ServerSpec:
    venv = prepare.transformers_serving()
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": THREADS}
    command = (str(venv / "bin/transformers"), "serve", str(model), "--device", "cpu", "--dtype", "bfloat16")
    return ServerSpec("transformers", installed_version(venv, "transformers"), command, (model,), environment)


def vllm_eager(model: Path) -> ServerSpec:
    """Return vLLM without its compilation, which takes minutes, and with the times of each request in its answers."""
    spec = vllm(model, max_running=SLOTS)
    return replace(spec, arguments=(*spec.arguments, "--enforce-eager", "--enable-per-request-metrics"))


ENGINES: Mapping[str, Callable[[Path], ServerSpec]] = {
    "llama-cpp": lambda model: llama_cpp(as_gguf(model), "--metrics", "--threads", THREADS, slots=SLOTS),
    "vllm-cpu": vllm_eager,
    "transformers": transformers_serve,
}


def model_of(spec: ServerSpec) -> str:
    """Return the name of the model in requests."""
    return str(spec.files[0]) if spec.name == "transformers" else demo.NAME


def running_engine(spec: ServerSpec, port: int) -> AbstractContextManager[ServerProcess]:
    log_file = prepare.FOLDER / "logs" / f"engine-{spec.name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    return running_process(
        spec.command(port),
        port,
        env={**os.environ, **spec.environment},
        log_file=log_file,
        ready_path=CHAT,
        question=QUESTION | {"model": model_of(spec)},
        start_limit_seconds=START_LIMIT_SECONDS,
    )


@contextmanager
def running_gateway(url: str, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Run a gateway in front of the engine at a URL."""
    port = free_port()
    command = [sys.executable, "-m", "oaiserve", "route", "--engine", url, "--port", str(port)]
    with running_process([*command, *flags], port, env=env) as gateway:
        yield gateway
