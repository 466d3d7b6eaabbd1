"""Imports make no circle, and costly packages are imported late. The rest is in pyproject.toml, for lint-imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted([*(ROOT / "oaiserve").rglob("*.py"), *(ROOT / "loadtest").rglob("*.py")])


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Return the modules that are imported anywhere in the file, also late and for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                place = ROOT / submodule.replace(".", "/")
                found.add(submodule if place.with_suffix(".py").exists() or place.is_dir() else node.module)
    return found


def test_imports_make_no_circle() -> None:
    """This counts imports for types, and those within functions."""
    modules = {module_name(path): path for path in MODULES}
    imports = {name: imports_of(path) & modules.keys() - {name} for name, path in modules.items()}
    while imports:
        free = {name for name, imported in imports.items() if not imported & imports.keys()}
        assert free, f"a circle among {sorted(imports)}"
        imports = {name: imported for name, imported in imports.items() if name not in free}


@pytest.mark.parametrize(
    "module", ["oaiserve", "oaiserve.engine.engine", "oaiserve.cli", "oaiserve.scale.front_ends.serve", "loadtest.cli"]
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
