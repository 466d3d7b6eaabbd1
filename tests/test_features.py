"""tests/features.md has a line for each command and flag that exists, and for nothing else."""

import re
from pathlib import Path

import pytest
from cyclopts import App

from loadtest.cli import _command_line as bench
from oaiserve.cli import OTHER_COMMANDS, SMALL_COMMANDS, command_line, small_command
from oaiserve.plugin_loading import OURS, commands_of, own_plugins
from tests.missing_plugins import has_command

ROOT = Path(__file__).parent.parent
SECTIONS = dict(
    section.split("\n", 1) for section in (ROOT / "tests/features.md").read_text().split("\n## ")[1:]
)  # by title
SERVE = (
    "`oaiserve serve`: the server",
    "`oaiserve serve`: the engine",
    "`oaiserve serve`: telemetry and several models",
)


def first_cells(title: str) -> list[str]:
    return [line.split("|")[1] for line in SECTIONS[title].splitlines() if line.startswith("| `")]


def named(title: str, pattern: str = "`([^`]+)`") -> list[str]:
    return [name for cell in first_cells(title) for name in re.findall(pattern, cell)]


def flags(command: App, app: App | None = None) -> set[str]:
    """Return the flags of a command, as `--help` shows them: without the forms that turn one off."""
    arguments = command.assemble_argument_collection(
        default_parameter=(app or command).default_parameter, parse_docstring=True
    )
    return {each.names[0] for each in arguments if each.parse and each.names[0].startswith("--")}


def without_no(names: list[str], existing: set[str]) -> list[str]:
    """Return flags with `--no-x` as `--x` where that is the flag."""
    return [off if (off := name.replace("--no-", "--", 1)) in existing else name for name in names]


def commands() -> dict[str, App]:
    """Return the commands of their own command lines, by name."""
    small = SMALL_COMMANDS | {name: each for name, each in commands_of(own_plugins()).items() if not each.has_settings}
    apps = {name: small_command(name, each) for name, each in small.items()} | {"bench": bench("bench")}
    found = {}
    for name, app in apps.items():
        parts = [part for part in app if not part.startswith("-")]
        found |= {f"{name} {part}": app[part] for part in parts} if parts else {name: app}
    return found


def test_each_plugin_of_oaiserve_has_a_line() -> None:
    assert sorted(named("Plug-ins of oaiserve")) == sorted(OURS)


def test_each_command_has_a_line() -> None:
    listed = [name for name in named("Commands") if has_command(name.split()[0])]
    of_plugins = commands_of(own_plugins())
    with_settings = [name for name, each in of_plugins.items() if each.has_settings]
    assert sorted(listed) == sorted(["serve", *with_settings, *commands()])
    found = {*with_settings, *(name.split()[0] for name in commands())}
    assert found == {*OTHER_COMMANDS, *SMALL_COMMANDS, *of_plugins}


@pytest.mark.plugin("gateway", "inspector", "keys")
def test_each_flag_of_serve_has_one_line() -> None:
    app = command_line(lambda config, sock: 0, own_plugins())
    existing = flags(app["serve"], app)
    lines = [name for title in SERVE for name in named(title)]
    assert sorted(without_no(lines, existing)) == sorted(existing)


@pytest.mark.plugin("gateway")
def test_each_flag_of_route_beyond_those_of_serve_has_a_line() -> None:
    app = command_line(lambda config, sock: 0, own_plugins())
    further = flags(app["route"], app) - flags(app["serve"], app)
    assert sorted(named("`oaiserve route`")) == sorted(further)


def test_each_flag_of_other_commands_has_a_line_under_its_command() -> None:
    existing = {(name.split()[0], flag) for name, command in commands().items() for flag in flags(command)}
    lines = set()
    for cell in first_cells("Other commands"):
        heads, _, names = cell.partition(":")
        for head in re.findall("`([^`]+)`", heads):
            if has_command(head.split()[0]):
                lines |= {(head.split()[0], flag) for flag in re.findall("`(--[^`]+)`", names)}
    assert lines == existing
