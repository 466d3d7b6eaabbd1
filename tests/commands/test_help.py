"""Help fits on a screen, and shows each text and each flag whole."""

import io
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App
from rich.console import Console

import loadtest.cli
from oaiserve import cli
from oaiserve.plugin_loading import commands_of, own_plugins
from tests.missing_plugins import has_command

SMALL_COMMANDS = cli.SMALL_COMMANDS | commands_of(own_plugins())
FRAME = re.compile("[│╭╮╰╯─]")
# Each command with its application, and the words before its flags.
COMMANDS: dict[str, tuple[App, list[str]]] = {
    **{
        name: (cli.command_line(lambda config, sock: 0, own_plugins(), all_flags=True), [name])
        for name in ("serve", "route")
        if has_command(name)
    },
    **{name: (cli.small_command(name, each), []) for name, each in SMALL_COMMANDS.items() if name != "keys"},
    **{
        f"keys {name}": (cli.small_command("keys", SMALL_COMMANDS["keys"]), [name])
        for name in ("add", "list", "limit", "revoke")
        if "keys" in SMALL_COMMANDS
    },
    **{
        f"bench {name}": (loadtest.cli._command_line("bench"), [name])
        for name in ("run", "find-max", "compare", "diff")
    },
}


def shown(app: App, words: list[str], width: int) -> str:
    file = io.StringIO()
    app.help_print(words, console=Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_each_text_as_it_is_written(name: str) -> None:
    app, words = COMMANDS[name]
    command = app[words[0]] if words else app
    text = " ".join(FRAME.sub(" ", shown(app, words, 1000)).split())
    described, _, _ = (command.default_command.__doc__ or "").partition("Parameters\n")
    written = [described, *(argument.parameter.help or "" for argument in arguments(app, command))]
    for each in written:
        assert " ".join(each.replace("`", "").split()) in text


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("width", [80, 100])
def test_no_flag_is_broken_within(name: str, width: int) -> None:
    app, words = COMMANDS[name]
    text = shown(app, words, width)
    flags = [flag for argument in arguments(app, app[words[0]] if words else app) for flag in argument.names]
    for flag in (flag for flag in flags if flag.startswith("--")):
        assert re.search(rf"(?<=│ |  ){flag}(?= |$)| {flag} ", text, re.MULTILINE), flag


@pytest.mark.parametrize("name", [name for name in COMMANDS if not name.startswith("bench ")])
def test_a_repeatable_flag_is_shown_with_one_value(name: str) -> None:
    assert not re.search(r"^│ *--[^│]*[A-Z]\.\.\. ", shown(*COMMANDS[name], 1000), re.MULTILINE)


def arguments(app: App, command: App) -> list[Any]:
    found = command.assemble_argument_collection(default_parameter=app.default_parameter, parse_docstring=True)
    return [argument for argument in found if argument.parse]


def test_the_help_of_serve_has_twelve_flags_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    assert set(re.findall(r"^│ (--[a-z-]+)", text, re.MULTILINE)) == {
        *("--config", "--host", "--port", "--api-key", "--served-model-name", "--device", "--quantize", "--lora"),
        *("--cpu-threads", "--max-model-len", "--kv-cache-memory", "--max-running"),
    }
    assert re.findall(r"─ (\w+) ─", text) == ["Arguments", "Parameters", "Server", "Engine"]
    assert text.count("\n") < 50
    assert "Address to listen on. [default: 127.0.0.1]" in text  # the first sentence


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["li"], ["list"]),
        (["serve", "demo", "--max-r"], ["--max-running"]),
        (["serve", "demo", "--quantize", ""], ["none", "int8", "int4", "fp8"]),
        (["rm", "demo", "--y"], ["--yes"]),
    ],
)
def test_bash_completes_commands_flags_and_choices(
    tmp_path: Path, typed: list[str], completed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OAISERVE_PORT", "9000")  # not a setting of this command
    assert cli.main(["--install-completion", "--shell", "bash"]) == 0
    words = shlex.join(["oaiserve", *typed])
    script = f'. "$HOME/.bashrc"; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _oaiserve; echo "${{COMPREPLY[@]}}"'
    bash = subprocess.run(["bash", "--norc", "-c", script], check=True, capture_output=True, text=True)
    assert bash.stdout.split() == completed


@pytest.mark.parametrize(("shell", "flag"), [("zsh", "--max-running"), ("fish", "-l max-running")])
def test_scripts_for_other_shells_have_the_flags(tmp_path: Path, shell: str, flag: str) -> None:
    assert cli.main(["--install-completion", "--shell", shell, "--output", str(tmp_path / "script")]) == 0
    assert flag in (tmp_path / "script").read_text()
