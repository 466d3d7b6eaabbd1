"""How each server is started: with what its own documentation advises for a CPU, and room for the six workloads.

All serve the demo model in bfloat16 under one name, for requests of up to 2,048 tokens.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from oaiserve import demo
from tools.bench import prepare

ROOT = Path(__file__).parents[2]
CACHE = prepare.FOLDER / "cache"
OURS = "oaiserve"


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    version: str
    arguments: tuple[str, ...]  # all but the port
    files: tuple[Path, ...]  # what a start reads, besides what the system has in memory anyway
    environment: dict[str, str] = field(default_factory=dict)
    working_folder: Path = ROOT
    compile_caches: tuple[Path, ...] = ()  # empty at a first start
    ready_log: str | None = None  # what its log says once it has its full speed, where that is after the first answer
    model_name: str = demo.NAME

    def command(self, port: int) -> list[str]:
        return [*self.arguments, "--port", str(port)]

    def shown(self) -> str:
        """Its command line, with the names of files alone."""
        return shlex.join(Path(word).name if word.startswith("/") else word for word in self.arguments)


def oaiserve() -> Server:
    model, program, cache = demo.resolve(), Path(sys.executable).with_name("oaiserve"), CACHE / "oaiserve"
    return Server(
        OURS,
        _output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        (str(program), "serve", str(model), "--served-model-name", demo.NAME),
        (model,),
        {"OAISERVE_CACHE": str(cache)},
        compile_caches=(cache / "native",),
        ready_log="native step is ready",
    )


def vllm() -> Server:
    venv, model = prepare.vllm(), demo.resolve()
    # Both libraries are what its guide for CPUs advises to load first.
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
    limits = ("--max-model-len", "2048", "--max-num-seqs", "256", "--disable-uvicorn-access-log")
    return Server(
        "vllm-cpu",
        _installed(venv, "vllm-cpu") + ("" if allocator else ", without tcmalloc"),
        (str(venv / "bin/vllm"), "serve", str(model), "--served-model-name", demo.NAME, "--dtype", "bfloat16", *limits),
        (model, venv / "lib"),
        environment,
        compile_caches=(CACHE / "vllm", CACHE / "inductor"),
    )


def llama_cpp() -> Server:
    programs, model = prepare.llama_cpp(), prepare.gguf()
    slots = ("--parallel", "64", "--ctx-size", str(64 * 2048))
    said = _output(str(programs / "llama-server"), "--version")
    return Server(
        "llama-cpp",
        said.splitlines()[0].removeprefix("version: "),
        (str(programs / "llama-server"), "--model", str(model), "--alias", demo.NAME, *slots),
        (model, programs / "llama-server"),
    )


def transformers() -> Server:
    venv, model = prepare.transformers(), demo.resolve()
    hub = CACHE / "hub"
    hub.mkdir(parents=True, exist_ok=True)  # its /v1/models fails without
    launcher = Path(__file__).with_name("serve_transformers.py")
    options = ("--continuous-batching", "--device", "cpu", "--dtype", "bfloat16", "--log-level", "error")
    return Server(
        "transformers-cb",
        _installed(venv, "transformers"),
        (str(venv / "bin/python"), str(launcher), "serve", demo.NAME, *options),
        (model, venv / "lib"),
        {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub), "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
        working_folder=model.parent,  # so that it knows the model by its plain name
    )


PEERS: dict[str, Callable[[], Server]] = {"vllm-cpu": vllm, "llama-cpp": llama_cpp, "transformers-cb": transformers}


def _installed(venv: Path, package: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version('{package}'))"
    return _output(str(venv / "bin/python"), "-c", code)


def _output(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout.strip()
