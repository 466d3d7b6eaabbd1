"""The command `oaiserve doctor`."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from oaiserve.commands.models import stored_models
from oaiserve.commands.table import size
from oaiserve.engine.model.cpu import prebuilt
from oaiserve.engine.model.cpu.cores import usable_cpus
from oaiserve.engine.system_memory import available_bytes
from oaiserve.files import hub, private
from oaiserve.files.private import NotPrivate, cache_folder

DEMO_BYTES = 1_500_000_000  # of memory that a server of it takes
FEW_FILES = 1024
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "uvicorn", "starlette")


class Finding(NamedTuple):
    """A part of this machine, as it was found, and its meaning for serving."""

    part: str
    sentences: str
    fails: bool = False  # no server would start


def command() -> int:
    """Say what this machine, its limits and this installation mean for serving. The exit code is 1 if it would fail."""
    findings = [*_machine(), *_installation(), *_outside()]
    for finding in findings:
        print(fill(finding.sentences, 100, initial_indent=f"{finding.part:<14}", subsequent_indent=" " * 14))
    failing = [finding.part for finding in findings if finding.fails]
    print(f"\nServing would fail: see {', '.join(failing)}." if failing else "\nThis machine can serve.")
    return 1 if failing else 0


def _machine() -> Iterator[Finding]:
    cpus, count = usable_cpus(), os.cpu_count() or 1
    of_all = "" if cpus == count else f" of {count}: the rest is kept from this process, or from its container"
    yield Finding("machine", f"{platform.system()} on {platform.machine()}. {cpus} CPUs can be used{of_all}.")
    yield instruction_sets(platform.machine(), prebuilt.usable_features())
    yield memory(available_bytes(), container_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "as many as asked for" if hard == resource.RLIM_INFINITY else f"up to {hard}"
    few = f" That is few: each connection takes one (ulimit -n {FEW_FILES})." if 0 <= hard < FEW_FILES else ""
    yield Finding("open files", f"{soft} may be open, and a server raises that to {shown}.{few}", 0 <= hard < 64)


def instruction_sets(machine: str, features: frozenset[str]) -> Finding:
    if machine not in ("x86_64", "AMD64"):
        return Finding("instructions", f"Native code is compiled for this {machine} CPU.")
    if "amx_bf16" in features:
        text = "AMX: many tokens at once, as in prompts, go through tiles, which is fastest."
    elif "avx512f" in features:
        text = "AVX-512: native code runs at its full width; prompts would be faster with AMX."
    elif "avx2" in features:
        text = "AVX2, but no AVX-512: native code runs, and prompts take longer than with it."
    else:
        text = "There is no AVX2: models run without native code, which is much slower."
    return Finding("instructions", text)


def container_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory that the cgroup (v2) leaves, or None where it sets no limit."""
    try:
        return max(0, int((root / "memory.max").read_text()) - int((root / "memory.current").read_text()))
    except (OSError, ValueError):  # "max" is no limit
        return None


def memory(free_bytes: int, left_bytes: int | None) -> Finding:
    """Say how large a model may be, with half as much again as its weights for the KV cache and the rest."""
    usable = free_bytes if left_bytes is None else min(free_bytes, left_bytes)
    why = "" if usable == free_bytes else f", since the memory cgroup leaves no more of {size(free_bytes)}"
    text = (
        f"{size(usable)} are free{why}: room for about {usable / 3e9:.2g} billion parameters in bfloat16, or "
        f"{usable / 0.9e9:.2g} billion in 4 bits."
    )
    fails = usable < DEMO_BYTES
    return Finding("memory", f"{text} Even the demo needs {size(DEMO_BYTES)}." if fails else text, fails)


def _installation() -> Iterator[Finding]:
    found, missing = [f"oaiserve {version('oaiserve')}", f"Python {platform.python_version()}"], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    lacking = f" There is no {', '.join(missing)}: pip install 'oaiserve[cpu]' brings all." if missing else ""
    yield Finding("versions", f"{', '.join(found)}.{lacking}", bool(missing))
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(os.environ.get("CXX") or name)), None)
    if prebuilt.find("bf16") is not None:
        text = "Native code came with this installation: none is needed."
    elif compiler is not None:
        text = (
            f"{os.environ.get('CXX') or compiler} compiles the native code at the first start, in about half a minute."
        )
    else:
        text = "There is none, and no native code came with this installation: models run much slower. Install g++."
    yield Finding("compiler", text)
    if "torch" not in missing:
        yield _gpu()


def _gpu() -> Finding:
    from oaiserve.engine.model.gpu.found import gpu_names

    names = gpu_names()
    if not names:
        return Finding("GPU", "torch finds none, so models run on the CPU.")
    return Finding("GPU", f"{', '.join(names)}: models run there, unless --device cpu is given.")


def _outside() -> Iterator[Finding]:
    folder = cache_folder()
    try:
        private.make_folder(folder)
        space = shutil.disk_usage(private.verified(folder)).free
        yield Finding("cache", f"{folder} has room for {size(space)}.")
    except (OSError, NotPrivate) as error:
        yield Finding(
            "cache", f"{folder} cannot be used: {error}. Starts remember nothing; OAISERVE_CACHE names another folder."
        )
    models = len(stored_models())
    here = f"{models} {'model is' if models == 1 else 'models are'} on this disk (oaiserve list)."
    if hub.is_reachable():
        yield Finding("models", f"The Hugging Face hub answers. {here}")
    else:
        why = "The Hugging Face hub does not answer, or HF_HUB_OFFLINE is set: models can be served from this disk."
        yield Finding("models", f"{why} Behind a proxy, set HTTPS_PROXY; HF_ENDPOINT names a mirror. {here}")
