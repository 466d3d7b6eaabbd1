"""The door for plug-ins: how they are found, what they add to a server, and what happens if they fail."""

import ast
import importlib
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route

from oaiserve import cli
from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.text.chat_template import ChatTemplate
from oaiserve.errors import StartupError
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import RequestRecord
from oaiserve.plugin import PUBLIC_MODULES, Plugin, engine_of
from oaiserve.plugin_loading import OURS, OWN_SOURCE, load, rules_of
from oaiserve.routes.dialects.dialect import dialect_of
from oaiserve.telemetry import Measured, Telemetry
from tests.engine.doubles import TOKENIZER
from tests.missing_plugins import TOGETHER
from tests.plugin_pages import plugins_of_page
from tests.records import record_at
from tests.routes.dialects.reading import TOOLS, Read, read, segments_of
from tests.routes.doubles import FakeEngine, FakeTelemetry
from tests.serving import run_server
from tests.telemetry.reported import plugin_metrics

ROOT = Path(__file__).parent.parent
GREETING = """
from oaiserve.plugin import Command, Plugin

def command(name: str = "you", /) -> int:
    '''Greet somebody.'''
    print(f"Hello, {name}")
    return 3

plugin = Plugin(name="greeting", commands={"greet": Command("Greet somebody.", __name__)})
"""


def write_module(folder: Path, name: str, source: str) -> None:
    (folder / f"{name}.py").write_text(source)


def install(folder: Path, name: str, source: str) -> None:
    """Write a module, and metadata with an entry point for its `plugin`, as pip would."""
    write_module(folder, name, source)
    metadata = folder / f"{name}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(f"[oaiserve.plugins]\n{name} = {name}:plugin\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder from which Python imports, until the end of the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def names_of_others(*modules: str) -> dict[str, str]:
    """Return the sources of the plug-ins that aren't oaiserve's, by name."""
    return {each.plugin.name: each.source for each in load(modules) if each.plugin.name not in OURS}


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
    (packages / "wave.py").write_text(GREETING)
    (plugin,) = (each.plugin for each in load([str(packages / "wave.py")]) if each.plugin.name == "greeting")
    assert "wave" not in sys.modules
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


def length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(engine_of(request).max_model_len))


def broken_routes(config: Config) -> list[BaseRoute]:
    raise ValueError("no routes")


def test_a_route_of_a_plugin_reaches_the_engine_and_needs_a_key() -> None:
    plugin = Plugin(name="length", routes=lambda config: [Route("/v1/length", length)])
    config = Config("demo", ServerOptions(api_key=("secret",)))
    app = create_app(config, FakeEngine(), FakeTelemetry(), plugins=[plugin])  # type: ignore[arg-type]
    with run_server(app) as url:
        refused = httpx.get(f"{url}/v1/length")
        answered = httpx.get(f"{url}/v1/length", headers={"authorization": "Bearer secret"})
    assert refused.status_code == 401
    assert answered.text == str(FakeEngine().max_model_len)


@pytest.mark.parametrize("path", ["/health", "/v1/length"])
def test_a_route_with_a_path_that_is_taken_stops_the_start(path: str) -> None:
    plugins = [Plugin(name=name, routes=lambda config: [Route(path, length)]) for name in ("first", "second")]
    with pytest.raises(StartupError, match=f"has the route '{path}', which there is already"):
        create_app(Config("demo"), FakeEngine(), FakeTelemetry(), plugins=plugins)  # type: ignore[arg-type]


class Lifespan:
    def __init__(self, events: list[str], *, fails_at: str = "") -> None:
        self.events = events
        self.fails_at = fails_at

    async def __aenter__(self) -> None:
        self._reach("begin")

    async def __aexit__(self, *error: object) -> None:
        self._reach("end")

    def _reach(self, event: str) -> None:
        self.events.append(event)
        if event == self.fails_at:
            raise ValueError(event)


@pytest.mark.parametrize(
    ("fails_at", "events", "logged"),
    [
        ("", ["begin", "end"], []),
        ("begin", ["begin"], ["Plug-in 'clock' could not start, and the server goes on without it"]),
        ("end", ["begin", "end"], ["Plug-in 'clock' failed while the server stopped"]),
    ],
)
def test_a_lifespan_that_fails_is_named_in_the_log_and_the_server_goes_on(
    fails_at: str, events: list[str], logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    reached: list[str] = []
    plugin = Plugin(name="clock", lifespan=lambda app: Lifespan(reached, fails_at=fails_at))
    with run_server(create_app(Config("demo"), FakeEngine(), FakeTelemetry(), plugins=[plugin])) as url:  # type: ignore[arg-type]
        assert httpx.get(f"{url}/health").status_code == 200
        assert reached == ["begin"]
    assert reached == events
    assert [line.getMessage() for line in caplog.records if line.levelno == logging.ERROR] == logged


def test_stored_keys_without_their_plugin_stop_the_start() -> None:
    server = ServerOptions(stored_keys=True, response_store=Path("store"))
    with pytest.raises(StartupError, match="--stored-keys needs the plug-in 'keys'"):
        create_app(Config("demo", server), FakeEngine(), FakeTelemetry(), plugins=[])  # type: ignore[arg-type]


def test_routes_that_cannot_be_made_are_named_in_the_log_and_those_of_other_plugins_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugins = [
        Plugin(name="broken", routes=broken_routes),
        Plugin(name="length", routes=lambda config: [Route("/v1/length", length)]),
    ]
    with run_server(create_app(Config("demo"), FakeEngine(), FakeTelemetry(), plugins=plugins)) as url:  # type: ignore[arg-type]
        assert httpx.get(f"{url}/v1/length").status_code == 200
    assert "Plug-in 'broken' could not make its routes, and has none" in caplog.messages


def test_an_observer_gets_the_record_of_each_ended_request_and_one_that_fails_is_named_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    observed: list[RequestRecord] = []

    def fail(record: RequestRecord) -> None:
        raise ValueError

    telemetry = Telemetry(
        Measured("demo", "1", EngineNumbers),
        recent_requests=4,
        observers={"broken": fail, "ledger": observed.append},
        environ={},
    )
    record = record_at(0, 1)
    telemetry.record(record)
    assert telemetry.close(5)
    assert observed == [record]
    assert any(message.startswith("Telemetry consumer 'plugin broken' failed") for message in caplog.messages)
    assert b'oaiserve_telemetry_errors_total{consumer="plugin broken"} 1.0' in telemetry.render(None)[0]


def test_the_plugins_of_oaiserve_show_their_metrics() -> None:
    telemetry = FakeTelemetry()

    with run_server(create_app(Config("demo"), FakeEngine(), telemetry)):  # type: ignore[arg-type]
        numbers = {name: read() for name, read in telemetry.shown.items()}

    assert numbers.keys() == {metric.name for metric in plugin_metrics()}


def tree_without(folder: Path, *parts: str) -> Path:
    """Return a copy of oaiserve, of links, in which a folder is missing."""
    package = folder / "oaiserve"
    source = ROOT / "oaiserve"
    for part in parts:
        package.mkdir()
        for entry in source.iterdir():
            if entry.name != part:
                (package / entry.name).symlink_to(entry)
        package /= part
        source /= part
    return folder


@pytest.mark.parametrize("parts", [("plugins",), *(("plugins", name) for name in OURS)], ids="/".join)
def test_oaiserve_goes_on_without_the_folder_of_a_plugin(parts: tuple[str, ...], tmp_path: Path) -> None:
    code = """
import logging, sys
from starlette.testclient import TestClient
from oaiserve import app, cli, plugin_loading, run
from oaiserve.config import Config
from tests.routes.doubles import FakeEngine, FakeTelemetry
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
assert cli.main(["--help"]) == 0
assert cli.main(["plugins"]) == 0
server = app.create_app(Config("demo"), FakeEngine(), FakeTelemetry())
with TestClient(server, base_url="http://127.0.0.1") as client:
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
assert answer.json()["choices"][0]["message"]["content"] == "Hello world", answer.text
"""
    path = os.pathsep.join([str(tree_without(tmp_path, *parts)), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing = parts[1:] or OURS
    for name in missing:
        assert f"Plug-in '{name}' of oaiserve is left out, because its folder is missing" in done.stdout
    assert "Serve one model, or several." in done.stdout


def test_tests_of_other_subjects_import_no_plugin() -> None:
    """Otherwise they could not be collected after the plug-in was deleted with its tests."""
    for file in (ROOT / "tests").rglob("*.py"):
        folders = file.relative_to(ROOT / "tests").parts
        together = [names for path, names in TOGETHER.items() if file.is_relative_to(ROOT / "tests" / path)]
        allowed = {name for names in together for name in names}
        if folders[0] == "plugins":
            allowed.add(folders[1])
        for module in imports_of(file, is_top=True):
            top, room, *rest = [*module.split("."), "", ""]
            is_of_plugin = top in ("oaiserve", "tests") and room == "plugins" and rest[0] in OURS
            assert not is_of_plugin or rest[0] in allowed, f"{file} imports {module}"


def test_oaiserve_has_its_plugins() -> None:
    folders = {path.parent.name for path in (ROOT / "oaiserve/plugins").glob("*/__init__.py")}
    assert folders <= {*OURS}
    loaded = [each.plugin.name for each in load() if each.source == OWN_SOURCE]
    assert loaded == [name for name in OURS if name in folders]


def test_the_example_imports_public_modules() -> None:
    """import-linter checks the plug-ins of oaiserve."""
    (path,) = (ROOT / "examples").rglob("*.py")
    assert not private_imports(path)


def test_the_plugins_of_the_page_have_at_most_forty_lines_and_import_public_modules(tmp_path: Path) -> None:
    files = plugins_of_page(tmp_path)
    assert [file.name for file in files] == ["complete.py", "owl.py", "no_digits.py", "finch.py"]
    for file in files:
        assert file.read_text().count("\n") <= 40
        assert not private_imports(file)


def test_the_dialect_of_the_page_reads_and_writes_calls(tmp_path: Path, packages: Path) -> None:
    _, owl, *_ = plugins_of_page(tmp_path)
    (plugin,) = (each.plugin for each in load([str(owl)]) if each.plugin.name == "owl")
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{# <owl> <tool_call> #}", {})
    family = dialect_of("auto", "auto", template, {}, plugin.dialects).calls
    assert family is not None
    assert family.name == "owl"
    calls = [("get_time", '{"zone": "utc"}')] * 2
    written = family.written(calls)
    assert read(segments_of(family.parser(TOOLS), list(f"It is late.{written}"))) == Read("It is late.", "", calls)


def test_the_rule_of_the_page_forbids_digits(tmp_path: Path, packages: Path) -> None:
    *_, no_digits, _ = plugins_of_page(tmp_path)
    plugins = [each.plugin for each in load([str(no_digits)])]
    rules = rules_of(plugins, TOKENIZER)
    assert [rule.plugin for rule in rules] == ["no-digits"]
    ids = [number for number in range(TOKENIZER.vocab_size) if any(map(str.isdigit, TOKENIZER.token_text(number)))]
    logits = torch.zeros(TOKENIZER.vocab_size)
    rules[0].edit(logits, [])
    assert torch.isinf(logits).nonzero().flatten().tolist() == ids
    assert ids


def test_the_example_is_installed_by_pip_and_removed(packages: Path, tmp_path: Path) -> None:
    flags = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(packages)]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, str(ROOT / "examples/plugin")], check=True)
    settings = {"ledger": {"file": str(tmp_path / "ledger.csv")}}
    (ledger,) = (each for each in load(settings=settings) if each.plugin.name == "ledger")
    assert ledger.source == "oaiserve-ledger 1.0"
    assert ledger.plugin.observe is not None
    ledger.plugin.observe(record_at(0, 1, client="alice", prompt_tokens=5, completion_tokens=2))
    assert (tmp_path / "ledger.csv").read_text() == "alice,demo,finished,5,2\n"
    shutil.rmtree(packages / "oaiserve_ledger-1.0.dist-info")
    assert names_of_others() == {}


def private_imports(path: Path) -> list[str]:
    """Return the modules of oaiserve that a file imports, and that are not public."""
    public = tuple(f"{module}." for module in PUBLIC_MODULES)
    return [each for each in imports_of(path) if each.startswith("oaiserve") and not f"{each}.".startswith(public)]


def imports_of(path: Path, *, is_top: bool = False) -> list[str]:
    """Return the modules that a file imports, or with `is_top` those that its own import imports."""
    tree = ast.parse(path.read_text())
    modules: list[str] = []
    for node in tree.body if is_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules
