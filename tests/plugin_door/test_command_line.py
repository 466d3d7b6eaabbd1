"""The settings and commands that plug-ins add to the command line."""

import importlib
import sys
from pathlib import Path

import pytest

from oaiserve import cli
from oaiserve.config import Config, ServerOptions
from tests.plugin_door.modules import GREETING, install, write_module


def test_tables_of_plugins_are_no_unknown_settings_of_the_server(packages: Path, tmp_path: Path) -> None:
    install(
        packages, "greeting", "from oaiserve.plugin import Plugin\nplugin = lambda settings: Plugin(name='greeting')"
    )
    file = tmp_path / "oaiserve.toml"
    file.write_text("max-running = 3\n[plugins.greeting]\ncolour = 1\n")
    seen: list[Config] = []
    serve = ["serve", "demo", "--port", "0", "--config", str(file)]
    assert cli.main(serve, lambda config, sock: seen.append(config) or 0) == 0
    assert (seen[0].engine.max_running, seen[0].file) == (3, file)


POLITE = """
from dataclasses import dataclass

from oaiserve.config import OptionError
from oaiserve.plugin import Plugin

@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    bow_degrees: int = 15
    '''How deep to bow.'''

    greet_with: tuple[str, ...] = ()
    '''Word to greet with. Repeatable.'''

    def __post_init__(self):
        if not 0 <= self.bow_degrees <= 90:
            raise OptionError(f"--bow-degrees is {self.bow_degrees}, but must be between 0 and 90.")

plugin = Plugin(name="polite", options={"Manners": Options})
"""


@pytest.fixture
def polite(packages: Path) -> type:
    """Install a plug-in with settings, and return their type."""
    install(packages, "polite", POLITE)
    module = importlib.import_module("polite")
    options: type = module.Options
    return options


def served_with(*argv: str) -> Config:
    seen: list[Config] = []
    assert cli.main(["serve", "demo", "--port", "0", *argv], lambda config, sock: seen.append(config) or 0) == 0
    return seen[0]


def test_settings_of_a_plugin_are_flags_variables_and_keys_of_the_file(
    polite: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "oaiserve.toml"
    file.write_text('bow-degrees = 45\ngreet-with = ["Ahoy"]\n')
    monkeypatch.setenv("OAISERVE_GREET_WITH", "Hello Hi")
    config = served_with("--config", str(file))
    assert config.of(polite) == polite(bow_degrees=45, greet_with=("Hello", "Hi"))
    assert served_with("--greet-with", "Hey").of(polite) == polite(greet_with=("Hey",))


def test_settings_of_a_plugin_that_are_not_set_are_the_defaults(polite: type) -> None:
    config = served_with()
    assert config == Config("demo", ServerOptions(port=0))
    assert config.of(polite) == polite()


@pytest.mark.parametrize("where", ["flag", "variable", "file"])
def test_a_plugin_that_the_settings_name_has_flags(where: str, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = packages / "polite.py"
    plugin.write_text(POLITE)
    file = packages / "oaiserve.toml"
    argv = ["--bow-degrees=30"]
    if where == "flag":
        argv += ["--plugin", str(plugin)]
    elif where == "variable":
        monkeypatch.setenv("OAISERVE_PLUGIN", str(plugin))
    else:
        file.write_text(f"plugin = '{plugin}'\n")
        argv.append(f"--config={file}")
    config = served_with(*argv)
    assert config.of(sys.modules["oaiserve_plugin_polite"].Options).bow_degrees == 30


@pytest.mark.usefixtures("polite")
def test_settings_of_a_plugin_have_a_group_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help-all"]) == 0
    _, _, group = capsys.readouterr().out.partition("─ Manners ─")
    assert "How deep to bow. [default: 15]" in group


@pytest.mark.usefixtures("polite")
@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--bow-degree", "3"], "Unknown option --bow-degree. Did you mean --bow-degrees?"),
        (["--bow-degrees", "91"], "--bow-degrees is 91, but must be between 0 and 90."),
    ],
)
def test_wrong_settings_of_a_plugin_are_one_sentence(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "demo", *argv]) == 2
    assert capsys.readouterr().err == f"oaiserve: {sentence}\n"


def test_a_setting_of_a_plugin_with_the_name_of_another_stops_the_start(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(packages, "polite", POLITE.replace("bow_degrees", "max_running"))
    assert cli.main(["serve", "demo"]) == 2
    assert capsys.readouterr().err == (
        "oaiserve: Plug-in 'polite' has the flag '--max-running', which there is already.\n"
    )


@pytest.mark.usefixtures("polite")
def test_shells_complete_settings_of_plugins(tmp_path: Path) -> None:
    assert cli.main(["--install-completion", "--shell", "bash", "--output", str(tmp_path / "script")]) == 0
    assert "--bow-degrees" in (tmp_path / "script").read_text()


def test_the_command_plugins_lists_names_sources_and_parts(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_module(packages, "greeting", GREETING)
    assert cli.main(["plugins", "--plugin", "greeting"]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["NAME", "FROM" + rows[0][1][4:]]
    assert ["greeting", "--plugin greeting  commands"] in rows


def test_a_command_of_a_plugin_is_in_the_help_and_runs(
    packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_module(packages, "greeting", GREETING)
    monkeypatch.setenv("OAISERVE_PLUGIN", "greeting")
    assert cli.main(["--help"]) == 0
    assert "Greet somebody." in capsys.readouterr().out
    assert cli.main(["greet", "Ada"]) == 3
    assert capsys.readouterr().out == "Hello, Ada\n"


def test_a_command_of_a_plugin_does_not_replace_one_of_oaiserve(
    packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_module(packages, "greeting", GREETING.replace('"greet"', '"list"'))
    monkeypatch.setenv("OAISERVE_PLUGIN", "greeting")
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "List the models on this disk." in shown
    assert "Greet somebody." not in shown


def test_a_broken_plugin_of_the_environment_is_one_sentence_for_every_command_of_plugins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OAISERVE_PLUGIN", "no_such_module")
    assert cli.main(["chat"]) == 2
    assert capsys.readouterr().err.startswith("oaiserve: --plugin is 'no_such_module', which cannot be loaded")
