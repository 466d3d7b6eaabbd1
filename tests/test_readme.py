"""The links, make targets, flags, routes and files that the documentation names exist, as do flags in panels."""

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
from oaiserve.cli import command_line
from oaiserve.config import Config
from oaiserve.plugin_loading import commands_of, own_plugins
from tests.missing_plugins import is_served
from tests.pages import PAGES, ROOT, anchors, links

APP = command_line(lambda config, sock: 0, own_plugins())
FLAGS = {
    name
    for command in ("serve", *(name for name, each in commands_of(own_plugins()).items() if each.has_settings))
    for argument in APP[command].assemble_argument_collection(default_parameter=APP.default_parameter)
    if argument.parse
    for name in argument.names
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_have_targets(page: Path) -> None:
    for target, heading in links(page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if heading:
            assert heading in anchors(linked.read_text()), f"{page.name} links to {target}#{heading}"


def test_a_link_to_a_heading_that_is_not_there_is_found() -> None:
    page = '# On *one* clock\n```sh\n# no heading\n```\n[a](b.md#c), [d](#e)\n<img src="f.svg">\n[g](https://h.i/j)'
    assert links(page) == [("b.md", "c"), ("f.svg", ""), ("", "e")]
    assert anchors(page) == {"on-one-clock"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    named = set(re.findall(r"(?:^|`|\d )make ([a-z]+)", page.read_text(), re.MULTILINE))
    assert named <= set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_commands_run_exist(page: Path) -> None:
    for module in re.findall(r"python -m ((?:deploy|loadtest|tools)\b[\w.]*)", page.read_text()):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page.name} runs {module}"


@pytest.mark.plugin("gateway", "media")
@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_source_files_that_pages_name_exist(page: str) -> None:
    for file in re.findall(r"`([a-z_]+/[\w/]+\.(?:py|h|cpp))`", (ROOT / page).read_text()):
        assert any((folder / file).exists() for folder in (ROOT, ROOT / "oaiserve")), f"{page} names {file}"


LOADTEST_FLAGS = {
    flag
    for options in (RunOptions, Search, Workload, Arrivals, HttpOptions, EngineRun)
    for name in (field.name.replace("_", "-") for field in fields(options))
    for flag in (f"--{name}", f"--no-{name}")
}


WITH_FLAGS = (
    *("architecture", "telemetry", "loadtest", "gateway", "runbook", "security", "start", "models", "slow-requests"),
    *("tools-and-reasoning", "reference/api", "reference/flags", "reference/limits"),
)
RULES_AND_PANELS = [*ROOT.glob("deploy/prometheus/*.yml"), *ROOT.glob("deploy/grafana/dashboards/*")]


@pytest.mark.plugin("gateway", "inspector", "keys")
@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{name}.md" for name in WITH_FLAGS), *map(str, sorted(RULES_AND_PANELS))]
)
def test_flags_exist(page: str) -> None:
    of_others = {"--max-num-seqs", "--max-num-batched-tokens", "--parallel"}  # vLLM's and llama.cpp's
    of_others |= {"--build", "--wait", "--data-urlencode", "--enable-feature"}  # docker's, curl's, Prometheus's
    # Flags of pip and uv.
    of_others |= {"--find-links", "--torch-backend", "--extra-index-url", "--quiet", "--constraint"}
    # Flags of tools.
    of_others |= {"--json", "--markdown", "--only", "--quick", "--seed", "--gguf", "--trace", "--server"}
    of_others |= {"--list", "--rounds", "--short", "--seconds"}  # likewise
    of_others |= {"--share", "--requests-per-minute"}  # of oaiserve keys limit
    of_others |= {"--no-table"}  # of oaiserve bench diff
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / page).read_text()))
    assert named - of_others <= {*FLAGS, *LOADTEST_FLAGS, "--config", "--help", "--help-all"}


def test_the_table_of_routes_has_every_route() -> None:
    table = (ROOT / "docs/reference/api.md").read_text().split("\n## Routes\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`(?:GET|POST|DELETE) ([^`]+)`", table))
    served = {route.path.replace(":path", "") for route in routes(Config("demo"))}
    assert {path for path in named if is_served(path)} == served


@pytest.mark.parametrize(
    ("page", "line", "source"),
    [
        pytest.param(
            "docs/keys.md",
            "Created the key 'alice'. Copy it now, because it is not shown again:",
            "plugins/keys/command.py",
            marks=pytest.mark.plugin("keys"),
        ),
        pytest.param(
            "docs/gateway.md",
            "Replica 2 (127.0.0.1:8002) gets no requests until it answers:",
            "plugins/gateway/watch.py",
            marks=pytest.mark.plugin("gateway"),
        ),
    ],
)
def test_quoted_output_is_that_of_the_code(page: str, line: str, source: str) -> None:
    """Names and numbers are those of the example; all other words are in a string of the source."""
    assert line in " ".join((ROOT / page).read_text().split())
    words = re.split(r"'alice'|2 \(127\.0\.0\.1:8002\)", line)
    text = (ROOT / "oaiserve" / source).read_text()
    assert all(part in text for part in words)
