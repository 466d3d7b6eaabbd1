"""The links, make targets, flags, routes and files that the documentation names exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from loadtest.arrivals import Arrivals
from loadtest.cli import RunOptions, Search
from loadtest.engine_target import EngineRun
from loadtest.http_target import HttpOptions
from loadtest.prompts import Workload
from oaiserve.app import routes
from oaiserve.config import Config, EngineOptions, ServerOptions, TelemetryOptions

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
README = (ROOT / "README.md").read_text()
DEFAULTS = {
    f"--{field.name.replace('_', '-')}": getattr(options, field.name)
    for options in (ServerOptions(), EngineOptions(), TelemetryOptions())
    for field in fields(options)
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_have_targets(page: Path) -> None:
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, heading


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    named = set(re.findall(r"(?:^|`|\d )make ([a-z]+)", page.read_text(), re.MULTILINE))
    assert named <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


LOADTEST_FLAGS = {
    flag
    for options in (RunOptions, Search, Workload, Arrivals, HttpOptions, EngineRun)
    for name in (field.name.replace("_", "-") for field in fields(options))
    for flag in (f"--{name}", f"--no-{name}")
}


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/architecture.md",
        "docs/telemetry.md",
        "docs/loadtest.md",
        "docs/runbook.md",
        "docs/security.md",
    ],
)
def test_flags_exist(page: str) -> None:
    of_others = {"--max-num-seqs", "--max-num-batched-tokens", "--parallel"}  # vLLM's and llama.cpp's
    of_others |= {"--build", "--wait"}  # docker's
    of_others |= {"--json", "--only", "--quick", "--seed"}  # of tools.attack
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / page).read_text()))
    assert named - of_others <= {*DEFAULTS, *LOADTEST_FLAGS, "--config", "--help"}


def test_defaults_in_the_table_of_flags_are_the_real_ones() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)` \| `([^`]*)` \|", README, re.MULTILINE)
    assert len(rows) >= 5
    assert rows == [(flag, str(DEFAULTS[flag])) for flag, _ in rows]


def test_the_table_of_endpoints_has_every_route() -> None:
    table = README.split("\n## Endpoints\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(?:GET|POST) ([^`]+)`", table))
    served = {route.path.replace(":path", "") for route in routes(Config("demo"))}
    assert named == served


def test_the_architecture_page_lists_every_file() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `((?:oaiserve|loadtest|deploy)/[^`]+)` \|", page, re.MULTILINE)
    packages = (ROOT / "oaiserve", ROOT / "loadtest", ROOT / "deploy")
    files = {str(path.relative_to(ROOT)) for p in packages for path in p.rglob("*.py") if path.stat().st_size}
    assert set(listed) == files
    assert len(listed) == len(files)
