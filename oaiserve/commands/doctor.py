"""The command `oaiserve doctor`."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import fill, indent
from typing import NamedTuple

from oaiserve.checkpoints import demo, hub
from oaiserve.checkpoints.soundness import refuse_unless_sound
from oaiserve.checkpoints.source import find_model
from oaiserve.commands.listening import ended_by_interrupts
from oaiserve.commands.models import stored_models
from oaiserve.commands.table import size
from oaiserve.engine.executors.native import prebuilt
from oaiserve.plugin_loading import findings_of, own_plugins
from oaiserve.screen import Screen
from oaiserve.storage import private
from oaiserve.storage.private import NotPrivate, cache_folder
from oaiserve.system_cpus import usable_cpus
from oaiserve.system_memory import container_bytes, free_bytes

DEMO_BYTES = 1_500_000_000  # memory that a server with the demo model takes
FEW_FILES = 1024
WRITTEN_BYTES = 64 * 1024
INDENT = 14  # columns for the name of a part
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "uvicorn", "starlette")


class Finding(NamedTuple):
    """A part of this machine, and its meaning for serving."""

    part: str
    sentences: str
    fails: bool = False  # A server would not start.
    stores_nothing: bool = False  # No model could be downloaded; only those on the disk can be served.


def command(model: str | None = None, /) -> int:
    """Check whether this machine can serve models, and how well. The exit code is 1 if it cannot, or cannot store them.

    Parameters
    ----------
    model
        Compare a model with transformers' code instead: each layer, in float32. This takes eight bytes of memory for
        each weight. A folder, a .gguf file, a hub id or demo, as for serve.
    """
    if model is not None:
        return _compare(model)
    screen = Screen.of(sys.stdout)
    width = min(100, screen.columns() or 100)
    findings = [*_machine(), *_installation(), *_outside()]
    for finding in findings:
        text = fill(finding.sentences, max(20, width - INDENT), break_on_hyphens=False)
        is_bad = finding.fails or finding.stores_nothing
        label = screen.painted(finding.part.ljust(INDENT), *(("red", "bold") if is_bad else ("dim",)))
        print(label + indent(text, " " * INDENT).removeprefix(" " * INDENT))
    failing = [finding.part for finding in findings if finding.fails]
    if failing:
        print("\n" + screen.painted(f"This machine cannot serve models: see {', '.join(failing)}.", "red", "bold"))
        return 1
    storing_nothing = [finding.part for finding in findings if finding.stores_nothing]
    if storing_nothing:
        sentence = "This machine can serve models that are on its disk, but it cannot store others"
        print("\n" + screen.painted(f"{sentence}: see {', '.join(storing_nothing)}.", "red", "bold"))
        return 1
    print("\n" + screen.painted("This machine can serve models.", "green") + " Try it: oaiserve serve demo")
    return 0


def _compare(model: str) -> int:
    """Compare a model with transformers' code. The exit code is 1 if they differ."""
    screen = Screen.of(sys.stdout)
    source = find_model(demo.fetched() if model == "demo" else model)
    if not source.is_local:
        source = hub.fetched(source, with_media=False)
    refuse_unless_sound(source)
    with ended_by_interrupts():
        from oaiserve.engine.decoder.description import NotKnown
        from oaiserve.engine.start.layer_comparison import LIMIT, compare_layers

    parts = []
    try:
        for part in compare_layers(source):
            print(f"{part.part.ljust(INDENT)}{part.apart:.1e}", flush=True)
            parts.append(part)
    except NotKnown as reason:
        print(f"There is nothing to compare, because transformers' code computes this model: {reason}.")
        return 0
    wrong = next((part for part in parts if not part.is_right), None)
    if wrong is None:
        print("\n" + screen.painted("All layers compute what transformers' code does.", "green"))
        return 0
    sentence = f"From {wrong.part} on, numbers differ from those of transformers' code by more than {LIMIT:g}."
    print("\n" + screen.painted(sentence, "red", "bold"))
    return 1


def _machine() -> Iterator[Finding]:
    cpus = usable_cpus()
    count = os.cpu_count() or 1
    if cpus == count:
        usable = f"{count} CPUs"
    else:
        usable = f"{cpus} of {count} CPUs, as this process or its container may use"
    yield Finding("machine", f"{platform.system()} on {platform.machine()} with {usable}.")
    yield instruction_sets(platform.machine(), prebuilt.usable_features())
    yield memory(free_bytes(), container_bytes())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield open_files(soft, hard)


def open_files(soft: int, hard: int) -> Finding:
    """Report the limits. A server raises the soft limit to the hard one."""
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", "There is no limit.")
    text = f"At most {hard:,} files and connections can be open at once."
    if soft != hard:
        text = f"At most {hard:,} files and connections can be open at once: a server raises its limit of {soft:,}."
    if hard < FEW_FILES:
        text += f" That is few, because each connection takes one. Raise it, as with: ulimit -n {FEW_FILES}"
    return Finding("open files", text, hard < 64)


def instruction_sets(machine: str, features: frozenset[str]) -> Finding:
    if machine not in ("x86_64", "AMD64"):
        return Finding("instructions", f"Native code is compiled for this CPU ({machine}).")
    if "amx_bf16" in features:
        text = "AMX: native code computes prompts at full speed."
    elif "avx512f" in features:
        text = "AVX-512: native code runs at full speed. Prompts would be faster on a CPU with AMX."
    elif "avx2" in features:
        text = "AVX2: native code runs. Prompts would be faster on a CPU with AVX-512."
    else:
        text = "This CPU has no AVX2, so models run without native code, which is much slower."
    return Finding("instructions", text)


def memory(of_machine: int, left_bytes: int | None) -> Finding:
    """Report how large a model may be. The KV cache and the rest take half as much again as the weights."""
    usable = of_machine if left_bytes is None else min(of_machine, left_bytes)
    if usable == of_machine:
        why = ""
    else:
        why = f" of {size(of_machine)}, as the container's limit leaves no more"
    text = (
        f"{size(usable)} are free{why}: enough for a model of about {usable / 3e9:.2g} billion parameters in bfloat16, "
        f"or {usable / 0.9e9:.2g} billion in 4 bits."
    )
    fails = usable < DEMO_BYTES
    return Finding("memory", f"{text} Even the demo model needs {size(DEMO_BYTES)}." if fails else text, fails)


def _installation() -> Iterator[Finding]:
    versions = [f"oaiserve {version('oaiserve')}", f"Python {platform.python_version()}"]
    missing = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        lacking = f" Missing: {', '.join(missing)}. Install them with: pip install 'oaiserve[cpu]'"
    else:
        lacking = ""
    yield Finding("versions", f"{', '.join(versions)}.{lacking}", bool(missing))
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(os.environ.get("CXX") or name)), None)
    if prebuilt.find("bf16") is not None:
        text = "Not needed: native code came with this installation."
    elif compiler is not None:
        text = f"{os.environ.get('CXX') or compiler} compiles native code at the first start, in about half a minute."
    else:
        text = "None was found, and this installation has no native code, so models run much slower. Install g++."
    yield Finding("compiler", text)
    if "torch" not in missing:
        yield from _gpu()


def _gpu() -> Iterator[Finding]:
    with ended_by_interrupts():
        from oaiserve.engine.gpu_names import gpu_names

        names = gpu_names()
    if names:
        yield Finding("GPU", f"{', '.join(names)}. Models run there unless --device cpu is given.")
    else:
        yield Finding("GPU", "PyTorch finds none, so models run on the CPU.")
    for part, sentences in findings_of(own_plugins()):
        yield Finding(part, sentences)


def _outside() -> Iterator[Finding]:
    yield _cache(cache_folder())
    if (trouble := _writing_trouble(hub.storage_folder())) is not None:
        advice = "Models of the hub are stored there. Set HF_HOME to another folder."
        yield Finding("hub's cache", f"{hub.storage_folder()} cannot be used: {trouble}. {advice}", stores_nothing=True)
    models = len(stored_models())
    here = f"{models} {'model is' if models == 1 else 'models are'} on this disk (see oaiserve list)."
    if hub.is_reachable():
        yield Finding("models", f"{here} The Hugging Face hub can be reached for more.")
    elif hub.is_offline():
        yield Finding("models", f"{here} HF_HUB_OFFLINE is set, so no others are downloaded.")
    else:
        why = "The Hugging Face hub cannot be reached, so no others can be downloaded."
        yield Finding("models", f"{here} {why} {hub.how_to_reach()}.")


def _cache(folder: Path) -> Finding:
    try:
        private.make_folder(folder)
        verified = private.verified(folder)
    except (OSError, NotPrivate) as error:
        trouble: str | None = getattr(error, "strerror", None) or str(error)
    else:
        trouble = _writing_trouble(verified)
    if trouble is not None:
        advice = (
            "Without a cache, every start is slow, and the demo has no place. Set OAISERVE_CACHE to another folder."
        )
        return Finding("cache", f"{folder} cannot be used: {trouble}. {advice}", stores_nothing=True)
    space = shutil.disk_usage(verified).free
    return Finding("cache", f"{folder}, with {size(space)} free.")


def _writing_trouble(folder: Path) -> str | None:
    """Return why no file can be written in this folder, or None if one can. Permissions alone would not reveal a full
    disk or a read-only mount."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(WRITTEN_BYTES))
    except OSError as error:
        return f"no file can be written in {there} ({error.strerror})"
    return None
