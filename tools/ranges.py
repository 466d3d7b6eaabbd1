"""Runs tests with the lowest and the newest versions that pyproject.toml allows: python -m tools.ranges

The version in constraints.txt is left out, because `make test` runs with it. The others are installed into build/range,
without what they need, unless `needs` names it. Only torch's builds for CPUs count, because CUDA takes gigabytes.
PyTorch's own index has them, at which PIP_EXTRA_INDEX_URL points; a version that pip doesn't find is named.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tools import retry_failed

ROOT = Path(__file__).parents[1]
INTO = ROOT / "build/range"
MAX_PROCESSES = 4
SELDOM_IMPORTED = "/transformers/models/"  # Few of these modules are, which are compiled then.
PYTEST = (
    *(sys.executable, "-m", "pytest", "--numprocesses", str(min(os.cpu_count() or 1, MAX_PROCESSES))),
    *("--dist", "loadfile", "--no-loadscope-reorder", "-m", "not kernels and not real"),
)


@dataclass(frozen=True)
class Tested:
    """What runs with other versions of a package: tests, or a command that gets their folders after `--NAME`."""

    tests: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # what older versions need, and the pinned one doesn't
    build: str | None = None  # the only local version that counts


# Executors do not know transformers, as a contract of imports says, so these compare what they compute with it.
BESIDE_TRANSFORMERS = tuple(
    f"tests/engine/executors/{name}.py" for name in ("test_reference", "test_described_families", "test_fallback")
)
# Models on a GPU. These are deleted with the plug-in, and so is what is compiled with several versions of Triton.
OF_CUDA = (
    *("tests/plugins/cuda/start", "tests/plugins/cuda/executor/test_adapters.py"),
    *("tests/plugins/cuda/executor/test_rehearsal.py", "tests/plugins/cuda/executor/test_triton_sampling.py"),
)
HAS_CUDA = (ROOT / "oaiserve/plugins/cuda/__init__.py").exists()
# Tests with the SDKs. Those of a plug-in are deleted with it.
OF_OPENAI = (
    *("tests/http/test_media.py", "tests/routes/test_protocol.py", "tests/routes/test_tools.py"),
    *("tests/plugins/batches/test_batches.py", "tests/plugins/responses/test_background.py"),
    *("tests/plugins/responses/test_compact.py", "tests/plugins/responses/test_conversations.py"),
    "tests/plugins/speech/test_routes.py",
)
OF_ANTHROPIC = tuple(f"tests/plugins/batches/test_message_{name}.py" for name in ("batches", "files"))
PACKAGES = {
    "uvicorn": Tested(("tests/http", "tests/routes/test_deadlines.py", "tests/e2e/test_shutdown.py")),
    "transformers": Tested(
        (
            *("tests/engine/decoder", *BESIDE_TRANSFORMERS, "tests/engine/model", "tests/engine/start"),
            *("tests/engine/text", "tests/plugins/speech/test_model.py", "tests/routes/dialects/test_declared.py"),
            *OF_CUDA,
        )
    ),
    "torch": Tested(
        (
            *(*BESIDE_TRANSFORMERS, "tests/engine/executors/test_reference_steps.py"),
            *("tests/engine/executors/native/test_numbers.py", "tests/plugins/cuda/executor/test_fake_gpu.py"),
            *("tests/engine/decoder/test_dense_logits.py", "tests/engine/model", "tests/engine/start", *OF_CUDA),
        ),
        build="cpu",
    ),
    "openai": Tested(("tests/routes/test_wishes.py", *OF_OPENAI), needs=("distro",)),
    "anthropic": Tested(("tests/routes/test_wishes.py", *OF_ANTHROPIC)),
    **({"triton": Tested(command=(sys.executable, "-m", "tools.gpu.kernels"))} if HAS_CUDA else {}),
}


@dataclass(frozen=True)
class Choice:
    """Versions to test of a package, and why the lowest or the newest isn't among them."""

    versions: tuple[Version, ...]
    notes: tuple[str, ...] = ()


def requirement(name: str) -> Requirement:
    """Return the requirement of pyproject.toml for a package, which may be in an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for texts in project["optional-dependencies"].values() for text in texts)]
    return next(one for one in map(Requirement, texts) if one.name == name and ">=" in str(one.specifier))


def pinned_version(name: str) -> Version:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(Version(line.partition("==")[2]) for line in lines if line.startswith(f"{name}=="))


def available(name: str) -> list[Version]:
    """Return the versions in pip's indexes."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    listed = re.search(r"^Available versions: (.*)$", said, re.MULTILINE)
    assert listed is not None
    return [Version(text) for text in listed[1].split(", ")]


def chosen(wanted: Requirement, versions: Sequence[Version], tested: Version, build: str | None = None) -> Choice:
    """Choose the lowest and the newest version of a range, except for the tested one."""
    of_build = [one for one in versions if one.local == build and Version(one.public) in wanted.specifier]
    lowest = next(Version(one.version) for one in wanted.specifier if one.operator == ">=")
    newest = max((Version(one.public) for one in versions if Version(one.public) in wanted.specifier), default=lowest)
    notes = [
        f"{wanted.name} {end} is left out: pip's indexes don't have it"
        + (f" as a build for '{build}'" if build else "")
        for end in dict.fromkeys((lowest, newest))
        if all(Version(one.public) != end for one in of_build)
    ]
    ends = [one for one in sorted(of_build) if Version(one.public) in (lowest, newest)]
    return Choice(tuple(one for one in ends if Version(one.public) != tested), tuple(notes))


def install(name: str, version: Version, needs: Sequence[str] = ()) -> Path:
    folder = INTO / f"{name}-{version}"
    if not folder.is_dir():
        unfinished = folder.with_name(f"unfinished-{folder.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(unfinished), f"{name}=={version}", *needs], check=True)
        compileall = [sys.executable, "-m", "compileall", "-q", "-x", SELDOM_IMPORTED, str(unfinished)]
        subprocess.run(compileall, check=False)  # Packages may have files for other versions of Python.
        unfinished.rename(folder)
    return folder


def by_end(versions: Mapping[str, Sequence[Version]], pinned: Mapping[str, Version]) -> list[dict[str, Version]]:
    """Return the packages with a version below the pinned one, and those with a version above it, if there are any.

    The versions of one end are tested together: starting the processes of tests takes longer than most packages' tests.
    """
    lowest, newest = (
        {name: one for name, several in versions.items() for one in several if (one < pinned[name]) is is_lower}
        for is_lower in (True, False)
    )
    return [end for end in (lowest, newest) if end]


def run_tests(folders: Mapping[str, Path], more: Sequence[str], retry: bool = False) -> bool:
    """Run the tests of several packages once, with all their versions. Return whether they pass."""
    print(f"-- tests with {', '.join(folder.name for folder in folders.values())}", flush=True)
    tests = dict.fromkeys(path for name in folders for path in PACKAGES[name].tests if (ROOT / path).exists())
    path = os.pathsep.join(filter(None, (*map(str, folders.values()), os.environ.get("PYTHONPATH"))))
    call = retry_failed.run if retry else subprocess.call
    return call([*PYTEST, *tests, *more], env=os.environ | {"PYTHONPATH": path}) == 0


def run_command(name: str, folders: Iterable[Path]) -> bool:
    """Run the command of a package with the versions in the folders. Return whether it succeeds."""
    options = [text for folder in folders for text in (f"--{name}", str(folder))]
    return not options or subprocess.call([*PACKAGES[name].command, *options]) == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PACKAGES, help="a package; repeatable")
    parser.add_argument("--install", action="store_true", help="only install the versions, and test nothing")
    parser.add_argument("--retry", action="store_true", help="try up to three failed tests of a run once more")
    parser.add_argument("--pytest", default="", metavar="FLAGS", help="more flags of pytest")
    arguments = parser.parse_args(argv)
    names = arguments.only or list(PACKAGES)
    pinned = {name: pinned_version(name) for name in names}
    folders: dict[tuple[str, Version], Path] = {}
    versions: dict[str, tuple[Version, ...]] = {}
    for name in names:
        choice = chosen(requirement(name), available(name), pinned[name], PACKAGES[name].build)
        versions[name] = choice.versions
        folders |= {(name, one): install(name, one, PACKAGES[name].needs) for one in choice.versions}
        if not arguments.install:
            print(*choice.notes, sep="\n", end="\n" if choice.notes else "", flush=True)
    if arguments.install:
        return 0
    tested = {name: several for name, several in versions.items() if not PACKAGES[name].command}
    passed = [
        run_tests(
            {name: folders[name, one] for name, one in end.items()}, shlex.split(arguments.pytest), arguments.retry
        )
        for end in by_end(tested, pinned)
    ]
    passed += [
        run_command(name, [folders[name, one] for one in several])
        for name, several in versions.items()
        if PACKAGES[name].command
    ]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
