"""Imports make no circle, and costly packages are imported late. The rest is in pyproject.toml, for lint-imports."""

import subprocess
import sys
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent


def test_imports_make_no_circle() -> None:
    """This counts imports for types, and those within functions."""
    graph = grimp.build_graph("oaiserve", "loadtest")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100
    TopologicalSorter(imports).prepare()  # raises CycleError, with the circle


NO_TORCH = {"torch", "transformers"}
RANGES = {"oaiserve.engine.profiler_ranges", "oaiserve.engine.accounts.ranged", "oaiserve.engine.model.torch_ranges"}
NO_TRANSFORMERS = {"transformers", "torch._dynamo", "opentelemetry.sdk"}
# What runs in a process, step by step, and the packages that it must not have imported by then.
STEPS = (
    ("import oaiserve", NO_TORCH),
    ("import oaiserve.engine.engine", NO_TORCH),
    ("import oaiserve.engine.text.detokenize", NO_TORCH),
    ("import oaiserve.cli", NO_TORCH),
    ("import loadtest.cli", NO_TORCH),
    ("oaiserve.cli.main(['serve', '--help'])", {"torch"}),
    # What starts a model with a description.
    ("import oaiserve.engine.text.tokenizer", NO_TRANSFORMERS),
    ("import oaiserve.app", NO_TRANSFORMERS),
    ("import oaiserve.engine.start.ways.described", NO_TRANSFORMERS | RANGES),
)
PS = (
    "from oaiserve import cli; cli.main(['ps'])",
    {"torch", "transformers", "numpy", "uvicorn", "starlette", "huggingface_hub", "httpx"},
)

APP = ("import oaiserve.app", {"cyclopts", "sqlite3"})  # as in a process that reads no command line


@pytest.mark.parametrize("steps", [STEPS, (PS,), (APP,)], ids=["server", "ps", "app"])
def test_costly_packages_are_imported_late(steps: Sequence[tuple[str, set[str]]]) -> None:
    lines = [f"{code}; assert not (too_early := {late} & sys.modules.keys()), too_early" for code, late in steps]
    code = "\n".join(["import sys", *lines])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_build_of_a_wheel_needs_no_package() -> None:
    """hatch_build.py imports how native code is compiled, in an environment that has hatchling alone."""
    code = (
        "import sys, oaiserve.engine.executors.native.variants; assert not any('site-packages' in p for p in sys.path)"
    )
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=ROOT)
