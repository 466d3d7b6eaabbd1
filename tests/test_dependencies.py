"""The declared dependencies are the imported packages, and the tested versions are in their ranges."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from oaiserve.plugin_loading import OURS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LATER_MODULES = {"compression"}  # in the standard library from Python 3.14 on
EXTRAS = ("audio", "ray", "speech", "triton")


def declared() -> dict[str, SpecifierSet]:
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *(text for extra in EXTRAS for text in extras[extra])]
    return {canonicalize_name(one.name): one.specifier for one in map(Requirement, texts)}


def pinned() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if "==" in line]
    return {canonicalize_name(name): Version(version) for name, version in pins}


def imported_packages() -> set[str]:
    """Return the top-level packages that the product and the load test import, anywhere in their code."""
    packages = set()
    for path in [*(ROOT / "oaiserve").rglob("*.py"), *(ROOT / "loadtest").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                packages |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
                packages.add(node.module.partition(".")[0])
    return packages - sys.stdlib_module_names - LATER_MODULES - {"oaiserve", "loadtest"}


def owners() -> dict[str, set[str]]:
    """Return the distributions of each imported package. Several share the package opentelemetry."""
    distributions = packages_distributions()  # Ray need not be installed.
    return {name: {canonicalize_name(one) for one in distributions.get(name, [name])} for name in imported_packages()}


def test_what_is_imported_is_declared() -> None:
    assert {name for name, names in owners().items() if not names & declared().keys()} == set()


@pytest.mark.plugin(*OURS)
def test_what_is_declared_is_imported() -> None:
    assert declared().keys() - set().union(*owners().values()) == set()


def test_tested_versions_are_in_the_declared_ranges() -> None:
    versions = pinned()
    assert {name: versions[name] for name, allowed in declared().items() if versions[name] not in allowed} == {}


def test_the_range_of_transformers_ends_with_the_tested_minor_version() -> None:
    version = pinned()["transformers"]
    assert Version(f"{version.major}.{version.minor}.999") in declared()["transformers"]
    assert Version(f"{version.major}.{version.minor + 1}") not in declared()["transformers"]
