"""Says how each server is started: as its own documentation advises for a CPU, with room for the six workloads.

All servers serve the demo model in bfloat16 under one name, for requests of up to 2,048 tokens.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oaiserve.checkpoints import demo
from tools import machine
from tools.bench import prepare
from tools.server_process import CHAT, QUESTION, ROOT, ServerProcess, free_port, running_process

START_LIMIT_SECONDS = 1200
CACHE = prepare.FOLDER / "cache"
OURS = "oaiserve"


@dataclass(frozen=True, slots=True)
class ServerSpec:
    name: str
    version: str
    arguments: tuple[str, ...]  # all but the port
    files: tuple[Path, ...]  # read by a start, and not in the system's memory anyway
    environment: dict[str, str] = field(default_factory=dict)
    compile_caches: tuple[Path, ...] = ()  # empty at a first start

    def command(self, port: int) -> list[str]:
        return [*self.arguments, "--port", str(port)]

    def running(
        self, ready_path: str = CHAT, question: dict[str, Any] = QUESTION
    ) -> AbstractContextManager[ServerProcess]:
        """Run the server on a free port, from its first whole answer to the end of the block."""
        log_file = prepare.FOLDER / "logs" / f"{self.name}.log"
        port = free_port()
        log_file.parent.mkdir(parents=True, exist_ok=True)
        return running_process(
            self.command(port),
            port,
            env={**os.environ, **self.environment},
            cwd=ROOT,
            log_file=log_file,
            ready_path=ready_path,
            question=question | {"model": demo.NAME},
            start_limit_seconds=START_LIMIT_SECONDS,
        )

    def shown(self) -> str:
        """Return the command line without the folders of its files."""
        return shlex.join(Path(word).name if word.startswith("/") else word for word in self.arguments)


def oaiserve(model: Path | None = None, *flags: str, drafts: str = "off") -> ServerSpec:
    model = model or demo.fetched()
    cache = CACHE / "oaiserve"
    program = Path(sys.executable).with_name("oaiserve")
    return ServerSpec(
        OURS,
        machine.version(),
        # Answers to random prompts repeat themselves, so drafts would gain more than on real text.
        (str(program), "serve", str(model), "--served-model-name", demo.NAME, "--drafts", drafts, *flags),
        (model,),
        {"OAISERVE_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": ""},  # An installation has bytecode.
        compile_caches=(cache / "native",),
    )


def vllm(model: Path | None = None, *, max_len: int = 2048, max_running: int = 256) -> ServerSpec:
    model = model or demo.fetched()
    venv = prepare.vllm()
    # vLLM's guide for CPUs advises to load both libraries first.
    allocator = next(Path("/usr/lib").rglob("libtcmalloc_minimal.so.4"), None)
    libraries = [str(path) for path in (allocator, venv / "lib/libiomp5.so") if path is not None]
    environment = {
        "LD_PRELOAD": ":".join(libraries),
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    limits = ("--max-model-len", str(max_len), "--max-num-seqs", str(max_running), "--disable-uvicorn-access-log")
    limits += ("--enable-prompt-tokens-details",)
    return ServerSpec(
        "vllm-cpu",
        installed_version(venv, "vllm-cpu") + ("" if allocator else ", without tcmalloc"),
        (str(venv / "bin/vllm"), "serve", str(model), "--served-model-name", demo.NAME, "--dtype", "bfloat16", *limits),
        (model, venv / "lib"),
        environment,
        compile_caches=(CACHE / "vllm", CACHE / "inductor"),
    )


def llama_cpp(model: Path | None = None, *flags: str, slots: int = 64, slot_tokens: int = 2048) -> ServerSpec:
    model = model or prepare.gguf()
    program = prepare.llama_cpp() / "llama-server"
    sizes = ("--parallel", str(slots), "--ctx-size", str(slots * slot_tokens))
    version = _output(str(program), "--version")
    return ServerSpec(
        "llama-cpp",
        version.splitlines()[0].removeprefix("version: "),
        (str(program), "--model", str(model), "--alias", demo.NAME, *sizes, *flags),
        (model, program),
    )


PEERS: dict[str, Callable[..., ServerSpec]] = {  # by the path of a model, or none for the demo model
    "vllm-cpu": vllm,
    "llama-cpp": llama_cpp,
}


def installed_version(venv: Path, package: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version('{package}'))"
    return _output(str(venv / "bin/python"), "-c", code)


def _output(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout.strip()
