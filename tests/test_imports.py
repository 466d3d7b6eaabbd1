"""Imports make no circle, and costly packages are imported late. The rest is in pyproject.toml, for lint-imports."""

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


def test_imports_make_no_circle() -> None:
    """This counts imports for types, and those within functions."""
    graph = grimp.build_graph("oaiserve", "loadtest")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100
    TopologicalSorter(imports).prepare()  # raises CycleError, with the circle


NEED_NO_TORCH = (
    *("oaiserve", "oaiserve.engine.engine", "oaiserve.engine.text.detokenize", "oaiserve.cli", "loadtest.cli"),
    "oaiserve.scale.front_ends.process",
)
# What starts a model that has been checked.
NEED_NO_TRANSFORMERS = ("oaiserve.engine.start.ways.remembered", "oaiserve.engine.text.tokenizer", "oaiserve.app")
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


def imported_packages() -> set[str]:
    """Return the top-level packages that the product and the load test import, anywhere in their code."""
    found = set()
    for path in [*(ROOT / "oaiserve").rglob("*.py"), *(ROOT / "loadtest").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"oaiserve", "loadtest"}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(one for name in ("audio", "ray", "triton") for one in extras[name])]
    declared = {canonicalize_name(Requirement(text).name) for text in requirements}
    distributions = packages_distributions()
    # Ray is in no environment for tests. Several distributions share the package opentelemetry.
    owners = {name: {canonicalize_name(one) for one in distributions.get(name, [name])} for name in imported_packages()}
    assert {name for name, found in owners.items() if not found & declared} == set()
    assert declared - set().union(*owners.values()) == set()


def test_the_build_of_a_wheel_needs_no_package() -> None:
    """hatch_build.py imports how native code is compiled, in an environment that has hatchling alone."""
    code = "import sys, oaiserve.engine.model.cpu.variants; assert not any('site-packages' in p for p in sys.path)"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=ROOT, timeout=60)
