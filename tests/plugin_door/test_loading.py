"""How plug-ins are found and loaded, and what happens if they cannot be."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oaiserve import cli
from oaiserve.errors import StartupError
from oaiserve.plugin_loading import OWN_SOURCE, load
from tests.missing_plugins import has_plugin
from tests.plugin_door.modules import GREETING, install, names_of_others, write_module


def test_an_installed_plugin_is_found_by_its_entry_point_and_gone_with_its_package(packages: Path) -> None:
    install(packages, "greeting", GREETING)
    assert names_of_others() == {"greeting": "greeting 1.5"}
    (packages / "greeting-1.5.dist-info" / "entry_points.txt").unlink()
    assert names_of_others() == {}


def test_a_flag_names_a_module_or_a_file(packages: Path) -> None:
    write_module(packages, "greeting", GREETING)
    assert names_of_others("greeting") == {"greeting": "--plugin greeting"}
    file = packages / "elsewhere" / "farewell.py"
    file.parent.mkdir()
    file.write_text("from oaiserve.plugin import Plugin\nplugin = Plugin(name='farewell')\n")
    assert names_of_others(str(file)) == {"farewell": f"--plugin {file}"}


def test_a_file_may_have_the_name_of_another_module_and_commands(packages: Path) -> None:
    (packages / "antigravity.py").write_text(GREETING)
    (plugin,) = (each.plugin for each in load([str(packages / "antigravity.py")]) if each.plugin.name == "greeting")
    assert "antigravity" not in sys.modules
    assert cli.small_command("greet", plugin.commands["greet"])(["Ada"], result_action="return_value") == 3


def test_an_installed_plugin_that_a_flag_names_too_is_loaded_once(packages: Path) -> None:
    install(packages, "greeting", GREETING)
    assert names_of_others("greeting") == {"greeting": "greeting 1.5"}


def test_two_plugins_of_one_name_are_refused_with_both_sources(packages: Path) -> None:
    install(packages, "greeting", GREETING)
    write_module(packages, "copied", GREETING)
    with pytest.raises(StartupError, match="'greeting': one from greeting 1.5, one from --plugin copied"):
        load(["copied"])


@pytest.mark.parametrize(
    ("source", "logged"),
    [
        ("raise SystemExit", "Plug-in 'broken' (broken 1.5) cannot be loaded, and is left out"),
        ("1 / 0", "Plug-in 'broken' (broken 1.5) cannot be loaded, and is left out"),
        (
            "plugin = 1",
            "Plug-in 'broken' (broken 1.5) is left out: its entry point must name an oaiserve.plugin.Plugin",
        ),
    ],
)
def test_an_installed_plugin_that_cannot_be_loaded_is_named_in_the_log_and_left_out(
    packages: Path, source: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(packages, "broken", source)
    assert names_of_others() == {}
    assert [line.getMessage() for line in caplog.records if line.levelno == logging.ERROR] == [logged]


def test_a_plugin_that_raises_startuperror_stops_the_start_with_its_reason(packages: Path) -> None:
    source = "from oaiserve.plugin import StartupError\nraise StartupError('The licence has expired.')"
    install(packages, "strict", source)
    with pytest.raises(
        StartupError, match=r"^Plug-in 'strict' \(strict 1.5\) refuses to start: The licence has expired"
    ):
        load()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "--plugin is 'broken', which cannot be loaded: ZeroDivisionError: division by zero."),
        ("plugin = None", "--plugin is 'broken', which has no plug-in."),
        (
            "from oaiserve.plugin import StartupError\nraise StartupError('No.')",
            "Plug-in 'broken' refuses to start: No.",
        ),
    ],
)
def test_a_plugin_of_a_flag_that_cannot_be_loaded_stops_the_start(packages: Path, source: str, reason: str) -> None:
    write_module(packages, "broken", source)
    with pytest.raises(StartupError) as caught:
        load(["broken"])
    assert str(caught.value).startswith(reason)


def test_a_plugin_of_a_flag_that_does_not_exist_stops_the_start() -> None:
    with pytest.raises(StartupError, match="No module named 'no_such_module'"):
        load(["no_such_module"])


CONFIGURED = """
from oaiserve.plugin import Plugin, StartupError

def plugin(settings):
    if settings.keys() - {"suffix"}:
        raise StartupError("it knows only suffix.")
    return Plugin(name="greeting-" + settings.get("suffix", "none"))
"""


def test_a_function_makes_a_plugin_from_its_table_in_the_config_file(packages: Path) -> None:
    install(packages, "greeting", CONFIGURED)
    (packages / "farewell.py").write_text(CONFIGURED)
    farewell = str(packages / "farewell.py")
    settings = {"greeting": {"suffix": "a"}, "farewell": {"suffix": "b"}}
    names = [each.plugin.name for each in load([farewell], settings) if each.source != OWN_SOURCE]
    assert names == ["greeting-a", "greeting-b"]
    assert names_of_others() == {"greeting-none": "greeting 1.5"}


@pytest.mark.parametrize(
    ("source", "settings", "reason"),
    [
        (CONFIGURED, {"greeting": {"colour": 1}}, "refuses to start: it knows only suffix."),
        (
            GREETING,
            {"greeting": {"colour": 1}},
            "it takes no settings, but the config file has colour.",
        ),
        (CONFIGURED, {"greetings": {}}, "[plugins.greetings] in the config file names no plug-in. There are: "),
    ],
)
def test_wrong_settings_of_plugins_stop_the_start(
    source: str, settings: dict[str, dict[str, int]], reason: str, packages: Path
) -> None:
    install(packages, "greeting", source)
    with pytest.raises(StartupError, match=re.escape(reason)):
        load(settings=settings)


def test_a_plugin_that_nobody_asks_is_not_imported_with_its_routes() -> None:
    code = (
        "import sys; from oaiserve.app import routes; from oaiserve.config import Config; "
        "from oaiserve.plugin_loading import import_early, own_plugins; "
        "import_early(own_plugins(), reads_calls=False); table = routes(Config('demo')); "
        "print(*sorted({route.path for route in table} & {'/api/chat', '/v1/audio/translations'})); "
        "print(*sorted(name for name in sys.modules if name.startswith('oaiserve.plugins.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    paths, modules = map(str.split, done.stdout.splitlines())
    routes_of = {"ollama": "/api/chat", "speech": "/v1/audio/translations"}
    assert paths == [path for name, path in routes_of.items() if has_plugin(name)]
    for name in routes_of:
        # What `oaiserve plugins` and /metrics show is declared without an import of what serves requests.
        declared = {f"oaiserve.plugins.{name}", f"oaiserve.plugins.{name}.metrics"}
        assert {module for module in modules if module.startswith(f"oaiserve.plugins.{name}")} <= declared
