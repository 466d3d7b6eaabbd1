"""Imports make no circle, and costly packages are imported late. The rest is in pyproject.toml, for lint-imports."""

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


NEED_NO_TORCH = (
    "oaiserve",
    "oaiserve.engine.engine",
    "oaiserve.engine.text.detokenize",
    "oaiserve.cli",
    "loadtest.cli",
)
# What starts a model with a description.
NEED_NO_TRANSFORMERS = ("oaiserve.engine.start.ways.described", "oaiserve.engine.text.tokenizer", "oaiserve.app")
PS_NEEDS_NONE_OF = {"torch", "transformers", "numpy", "uvicorn", "starlette", "huggingface_hub", "httpx"}


@pytest.mark.parametrize(
    ("code", "late"),
    [
        *((f"import {module}", {"torch", "transformers"}) for module in NEED_NO_TORCH),
        *((f"import {name}", {"transformers", "torch._dynamo", "opentelemetry.sdk"}) for name in NEED_NO_TRANSFORMERS),
        ("from oaiserve import cli; cli.main(['serve', '--help'])", {"torch"}),
        ("from oaiserve import cli; cli.main(['ps'])", PS_NEEDS_NONE_OF),
    ],
)
def test_costly_packages_are_imported_late(code: str, late: set[str]) -> None:
    code = f"import sys; {code}; assert not {late} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_build_of_a_wheel_needs_no_package() -> None:
    """hatch_build.py imports how native code is compiled, in an environment that has hatchling alone."""
    code = "import sys, oaiserve.engine.model.cpu.variants; assert not any('site-packages' in p for p in sys.path)"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=ROOT, timeout=60)
