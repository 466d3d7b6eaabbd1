"""Adds native code to a wheel, compiled for every variant of the compiler's architecture.

It is left out unless HATCH_BUILD_HOOK_ENABLE_CUSTOM is set to true: a wheel is pure Python then, and the native code is
compiled where it runs. CXX is the compiler, and may be one for another architecture.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "oaiserve/engine/executors/native"
LINKER_FLAGS = ["-Wl,--strip-all"]


class NativeCode(BuildHookInterface):
    """Compiles the libraries that `prebuilt.py` finds in an installed wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries, and name the wheel after the architecture that they are for."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from oaiserve.engine.executors.native import variants

        compiler = shlex.split(os.environ.get("CXX") or "g++")
        target = subprocess.run([*compiler, "-dumpmachine"], check=True, capture_output=True, text=True).stdout.strip()
        machine = target.split("-")[0]
        chosen = [variant for variant in variants.VARIANTS if variant.machine == machine and "linux" in target]
        if not chosen:
            raise ValueError(f"There is no native code for {target}, the target of {shlex.join(compiler)}.")
        self.folder = tempfile.TemporaryDirectory()

        def flags_for(variant: variants.Variant) -> list[str]:
            return [*variants.FLAGS, *variant.flags, "-w"]  # warnings are for those who change the code

        def compile_shared(variant: variants.Variant) -> Path:
            path = Path(self.folder.name) / f"{variant.name}.o"
            source = variants.SOURCES / variants.BLOCKS_SOURCE
            subprocess.run([*compiler, *flags_for(variant), "-c", str(source), "-o", str(path)], check=True)
            return path

        def compile_one(kind: str, variant: variants.Variant) -> Path:
            path = Path(self.folder.name) / variants.library_name(kind, variant)
            sources = [str(variants.SOURCES / name) for name in (variants.MAIN_SOURCE, "portable.cpp")]
            inputs = [*sources, str(shared[variant].result())]
            began = time.monotonic()
            flags = [*flags_for(variant), variants.kind_flag(kind), *LINKER_FLAGS]
            subprocess.run([*compiler, *flags, *inputs, "-o", str(path)], check=True)
            # In one piece with the end of its line, because other threads print, too.
            sys.stdout.write(f"Compiled {kind} for {variant.name} in {time.monotonic() - began:.0f} s\n")
            sys.stdout.flush()
            variants.seal(path, variants.origin(kind, variant))
            return path

        number = len(chosen) * len(variants.KINDS)
        print(f"Compiling {number} libraries for {machine}, {os.cpu_count()} at a time ...", flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            # They are submitted first, so that none waits for a thread on which a library waits for it.
            shared = {variant: threads.submit(compile_shared, variant) for variant in chosen}
            libraries = [threads.submit(compile_one, kind, variant) for variant in chosen for kind in variants.KINDS]
        for library in libraries:
            path = library.result()
            build_data["force_include"][str(path)] = f"{PACKAGE}/lib/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"  # auditwheel finds which manylinux this is

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the libraries, which are in the wheel now."""
        if version != "editable":
            self.folder.cleanup()
