"""Imports make no circle, and costly packages are imported late. The rest is in pyproject.toml, for lint-imports."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize(
    "module",
    [
        *("oaiserve", "oaiserve.engine.engine", "oaiserve.engine.text.detokenize", "oaiserve.cli"),
        *("oaiserve.scale.front_ends.process", "loadtest.cli"),
    ],
)
def test_torch_is_imported_late(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'transformers'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_build_of_a_wheel_needs_no_package() -> None:
    """hatch_build.py imports how native code is compiled, in an environment that has hatchling alone."""
    code = "import sys, oaiserve.engine.model.cpu.variants; assert not any('site-packages' in p for p in sys.path)"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(
    "module", ["oaiserve.engine.start.ways.remembered", "oaiserve.engine.text.tokenizer", "oaiserve.app"]
)
def test_transformers_is_not_imported_for_a_model_that_has_been_checked(module: str) -> None:
    late = {"transformers", "torch._dynamo", "opentelemetry.sdk"}
    code = f"import sys, {module}; assert not {late} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
