import errno
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from oaiserve import __version__, cli
from oaiserve.commands.file_checks import files_with_keys
from oaiserve.commands.foreign_flags import OUR_COMMANDS, OUR_FLAGS, SHORT
from oaiserve.config import WITHOUT_FLAG, Bytes, Config, EngineOptions, ServerOptions, TelemetryOptions
from oaiserve.errors import StartupError
from oaiserve.routes.intake.sampling_defaults import given_defaults

FREE_PORT = ("--port", "0")
OF_GATEWAY = pytest.mark.plugin("gateway")


class Served:
    """A double of the server that keeps the config and the port that it is called with."""

    config: Config
    port: int

    def __call__(self, config: Config, sock: socket.socket) -> int:
        self.port = sock.getsockname()[1]
        self.config = config
        return 0


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("OAISERVE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def served() -> Served:
    return Served()


def serve(served: Served, *flags: str, model: str = "demo") -> Config:
    assert cli.main(["serve", model, *FREE_PORT, *flags], served) == 0
    return served.config


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a wrong command line and return its error message, which must be one line."""
    assert cli.main(argv, Served()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("oaiserve: ")
    assert err.count("\n") == 1
    return err


def test_without_flags_every_setting_has_its_default(served: Served) -> None:
    assert serve(served) == Config("demo", ServerOptions(port=0), EngineOptions(), TelemetryOptions())


def test_every_option_is_a_flag_with_a_help_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # so that no flag is broken over two lines
    assert cli.main(["serve", "--help-all"], Served()) == 0
    text = capsys.readouterr().out
    for group in (ServerOptions, EngineOptions, TelemetryOptions):
        for option in fields(group):
            assert (f"--{option.name.replace('_', '-')} " in text) == (option.name not in WITHOUT_FLAG)
    assert "[default: 256MiB]" in text
    assert "[default: ]" not in text


def test_flags_of_all_groups_are_set(served: Served) -> None:
    flags = "--api-key a --api-key b --max-running 7 --no-generation-config --kv-cache-memory 4GiB --recent-requests 3"
    server = ServerOptions(port=0, api_key=("a", "b"))
    engine = EngineOptions(max_running=7, generation_config=False, kv_cache_memory=Bytes("4GiB"))
    assert serve(served, *flags.split()) == Config("demo", server, engine, TelemetryOptions(recent_requests=3))


def test_a_variable_has_several_values_and_that_of_the_cache_is_no_setting(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OAISERVE_API_KEY", "a b")
    monkeypatch.setenv("OAISERVE_CACHE", "a folder")
    assert serve(served).server == ServerOptions(port=0, api_key=("a", "b"))


def test_flag_beats_environment_beats_file_beats_default(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "oaiserve.toml"
    file.write_text("max-running = 1\nmax-waiting = 1\nmax-step-tokens = 64\n")
    monkeypatch.setenv("OAISERVE_MAX_RUNNING", "2")
    monkeypatch.setenv("OAISERVE_MAX_WAITING", "2")
    engine = serve(served, "--config", str(file), "--max-running", "3").engine
    assert (engine.max_running, engine.max_waiting, engine.max_step_tokens, engine.block_size) == (3, 2, 64, 16)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'api_key = ["a", "b"]\nguard-all = true\nbody-limit = "1KiB"\n'),
        ("c.yaml", "api-key: [a, b]\nguard-all: true\nbody-limit: 1KiB\n"),
        ("c.json", '{"api-key": ["a", "b"], "guard-all": true, "body_limit": 1024}'),
    ],
)
def test_a_config_file_is_toml_yaml_or_json(served: Served, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    server = serve(served, "--config", str(tmp_path / name)).server
    assert (server.api_key, server.guard_all, server.body_limit) == (("a", "b"), True, 1024)


def test_the_environment_can_name_model_and_config_file(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.toml").write_text("port = 0\nserved-model-name = 'small'\n")
    monkeypatch.setenv("OAISERVE_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.setenv("OAISERVE_MODEL", "demo")
    assert cli.main(["serve"], served) == 0
    assert (served.config.model, served.config.server.served_model_name) == ("demo", ("small",))


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (("demo", "--port", "0", "--served-model-name", "a", "b", "c"), ("a", "b", "c")),
        (("demo", "--served-model-name", "a", "b", "--port", "0", "--served-model-name", "c"), ("a", "b", "c")),
        (("--port", "0", "--served-model-name", "a", "demo"), ("a",)),
        (("demo", "--port", "0"), ("demo",)),
    ],
)
def test_several_names_may_follow_one_flag_after_the_model(
    served: Served, argv: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert cli.main(["serve", *argv], served) == 0
    assert (served.config.model, served.config.model_names) == ("demo", names)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        *(
            (name, value, f"The environment variable OAISERVE_{name} is set, but empty.")
            for name in ("API_KEY", "API_KEY_FILE", "ALLOWED_HOST", "PORT")
            for value in ("", " ")
        ),
        ("MAX_RUNING", "3", "OAISERVE_MAX_RUNING is not a setting of oaiserve. Did you mean OAISERVE_MAX_RUNNING?"),
        ("STEP_TARGET_SECONDS", "3", "is not a setting of oaiserve. 'oaiserve serve --help' lists the settings."),
    ],
)
def test_a_wrong_variable_is_refused(
    name: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"OAISERVE_{name}", value)
    assert sentence in refusal(capsys, "serve", "demo", *FREE_PORT)


@pytest.mark.plugin("gateway")
@pytest.mark.parametrize(
    ("argv", "variable"), [(("serve", "demo"), "REPLICA"), (("route", "--engine", "http://127.0.0.1:1"), "MAX_RUNNING")]
)
def test_a_variable_of_another_command_is_no_mistake(
    argv: tuple[str, ...],
    variable: str,
    served: Served,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[object] = []
    monkeypatch.setattr("oaiserve.plugins.gateway.engines.serve.serve_engines", lambda *given: ended.append(given) or 0)
    monkeypatch.setenv(f"OAISERVE_{variable}", "7")
    assert cli.main([*argv, *FREE_PORT], served) == 0
    assert bool(ended) is (argv[0] == "route")
    other = "serve" if ended else "route"
    assert f"Without effect here, because 'oaiserve {other}' has these settings: OAISERVE_{variable}" in caplog.text
    monkeypatch.setenv("OAISERVE_MAX_RUNING", "7")
    assert cli.main([*argv, *FREE_PORT], served) == 2


@pytest.mark.parametrize(
    ("file", "content", "argv", "sentence"),
    [
        # An empty key must not start an open server.
        *(
            (file, content, "demo --config {file}", "api")
            for file, content in (
                ("c.toml", "api-key = []"),
                ("c.toml", 'api-key = ""'),
                ("c.toml", 'api-key = [""]'),
                ("c.toml", "api-key-file = []"),
                ("c.yaml", "api-key:"),
                ("c.yaml", "api_key: []"),
                ("c.json", '{"api-key": null}'),
                ("c.json", '{"api-key": ["good", ""]}'),
            )
        ),
        ("c.toml", "max-runing = 3", "demo --config {file}", "max-runing"),
        ("c.toml", "max-runing = 3", "demo --config {file}", "{file}"),
        ("c.toml", "[server]\nport = 3", "demo --config {file}", "Unknown option 'server.port' in {file}."),
        ("c.toml", "max-running = ", "demo --config {file}", "--config is '{file}', which cannot be read"),
        ("c.yaml", "- max-running", "demo --config {file}", "--config is '{file}', which must have names of settings"),
        ("c.json", "[3]", "demo --config {file}", "--config is '{file}', which must have names of settings"),
        ("other", "", "demo --api-key-file {folder}/keys", "cannot be read: No such file"),
        ("keys", "# none", "demo --api-key-file {file}", "has no keys"),
        ("model.txt", "", "{file}", "a file that is not a .gguf file"),
        ("other", "", "{folder}", "MODEL is '{folder}', a folder without a config.json"),
        ("model.Q4_K_M.gguf", "", "{folder}", "such as '{folder}/model.Q4_K_M.gguf'."),
        ("no.pem", "", "demo --tls-certificate {file} --tls-key {file}", "are not a PEM certificate and its key"),
        ("other", "", "demo --lora-dir {folder}/none", "none', which is not a folder."),
        (
            "adapter_config.json",
            '{"peft_type": "LORA", "use_dora": true}',
            "demo --lora sql={folder}",
            "--lora sql={folder} cannot be used: '{folder}/adapter_config.json': it is a DoRA adapter",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_before_the_model_loads(
    file: str, content: str, argv: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / file).write_text(content + "\n")
    names = {"file": tmp_path / file, "folder": tmp_path}
    arguments = [argument.format(**names) for argument in argv.split()]
    assert sentence.format(**names) in refusal(capsys, "serve", *FREE_PORT, *arguments)


def test_files_with_keys_are_known_so_that_the_log_warns_if_others_can_read_them(
    served: Served, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    settings = tmp_path / "c.toml"
    harmless = tmp_path / "d.yaml"
    keys.write_text("alice s3cret\n")
    settings.write_text('api_key = ["s3cret"]')
    harmless.write_text("max-running: 4")
    config = serve(served, "--config", str(settings), "--api-key-file", str(keys))
    assert files_with_keys(config) == [keys, settings]
    config = serve(served, "--api-key-file", str(keys), "--guard-all")
    assert (config.server.api_key_file, config.needs_key) == ((keys,), True)
    assert files_with_keys(serve(served, "--config", str(harmless))) == []


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["serv"], "Unknown command 'serv'. Did you mean serve?"),
        (["serve"], "MODEL is missing."),
        pytest.param(["serve", "demo", "demo"], "Two models have the name 'demo'.", marks=OF_GATEWAY),
        pytest.param(["route"], "--replica is missing.", marks=OF_GATEWAY),
        pytest.param(
            ["route", "http://a:1"], "'oaiserve route' takes flags only, as in --replica http://a:1.", marks=OF_GATEWAY
        ),
        pytest.param(
            ["route", "http://a", "http://b"],
            "takes flags only, as in --replica http://a --replica http://b.",
            marks=OF_GATEWAY,
        ),
        *(
            pytest.param(
                ["route", "--replica", url], f"--replica is '{url}', but must be a URL, as in", marks=OF_GATEWAY
            )
            for url in ("a:1", "http://a:65536", "http://a..b", f"http://{'a' * 64}", "http://[1.2.3.4]")
        ),
        pytest.param(
            ["route", "--replica", "http://a:1", "--port", "65536"],
            "--port is 65536, but must be between 0 and 65535.",
            marks=OF_GATEWAY,
        ),
        pytest.param(
            ["route", "--replica", "http://a:1", "--host", "192.0.2.1"],
            "Cannot listen on 192.0.2.1 port 8000",
            marks=OF_GATEWAY,
        ),
        (["serve", "demo", "--max-runing", "3"], "Unknown option --max-runing. Did you mean --max-running?"),
        (["serve", "demo", "--tls-cert", "x"], "Unknown option --tls-cert. Did you mean --tls-certificate?"),
        (["serve", "demo", "--step-target-seconds", "3"], "--step-target-seconds. See 'oaiserve serve --help'."),
        (["serve", "demo", "--strict-max-tokens"], "Unknown option --strict-max-tokens. See 'oaiserve serve --help'."),
        (["serve", "demo", "--max-num-seqs", "3"], "Unknown option --max-num-seqs. Here it is --max-running."),
        (["serve", "demo", "--ctx-size=3"], "Unknown option --ctx-size. Here it is --max-model-len."),
        (["serve", "demo", "-c", "3"], "Unknown option -c. Here it is --max-model-len."),
        (["serve", "-m", "x.gguf"], "Unknown option -m. Here it is MODEL, which comes first and has no flag"),
        (["serve", "demo", "--jinja"], "Unknown option --jinja. It is not needed: chat templates are in Jinja."),
        (["run", "demo"], "Unknown command 'run'. Here it is oaiserve chat, or oaiserve serve with its chat page."),
        (["serve", "demo", "--max-running", "x"], 'Invalid value for --max-running: unable to convert "x" into int.'),
        (["serve", "demo", "--api-key", ""], "--api-key is not usable"),
        (["serve", "demo", "--max-running", "0"], "--max-running is 0, but must be at least 1."),
        (["serve", "demo", "--device", "tpu"], 'Choose from: "auto", "cpu", "cuda".'),
        (["serve", "demo", "--body-limit", "8MB"], "--body-limit is wrong: '8MB' is not a size."),
        (["serve", "demo", "--host", "a" * 64], "which is not an address of this machine: not a valid name."),
        (["serve", "demo", "--host", "192.0.2.1"], "Cannot listen on 192.0.2.1 port 8000"),
        (["serve", "./no/such/folder"], "MODEL is './no/such/folder', which does not exist."),
        (["serve", "chat=demo"], "To serve one under a name: oaiserve serve demo --served-model-name chat"),
        (["serve", "no-such.gguf"], "MODEL is 'no-such.gguf', which does not exist."),
        (
            ["serve", ""],
            "MODEL is empty. It must be a folder, a .gguf file, a hub id (of GGUF files ID:Q4_K_M), or demo.",
        ),
        (
            ["serve", "demo", "--record-requests", "/"],
            "--record-requests is '/', which is a folder, and must be a file.",
        ),
        (["serve", "demo", "--config", "no-such.toml"], "which cannot be read: No such file or directory."),
        (["serve", "demo", "--config", "settings.ini"], "must end in .toml, .yaml, .yml, .json."),
        (["serve", "demo", "--tls-certificate", "c.pem", "--tls-key", "k.pem"], "--tls-certificate is 'c.pem'"),
        (["serve", "demo", "--chat-template", "c.jinja"], "--chat-template is 'c.jinja', which cannot be read"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in refusal(capsys, *argv)


def test_flags_of_other_servers_are_answered_with_flags_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"--no-compile", "--no-generation-config", "--no-prefix-cache"} | {
        "--" + field.name.replace("_", "-")
        for options in (ServerOptions, EngineOptions)
        for field in fields(options)
        if field.name not in WITHOUT_FLAG
    }
    named = {flag for ours in OUR_FLAGS.values() for flag in re.findall(r"--[a-z-]+", ours)}
    assert named <= flags
    assert not OUR_FLAGS.keys() & flags
    assert set(SHORT.values()) <= OUR_FLAGS.keys()


def test_settings_of_other_servers_in_a_file_are_answered_with_settings_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "models.toml"
    for key in ("ssl-certfile", "ssl_certfile"):
        file.write_text(f"{key} = 'cert.pem'\n")
        sentence = f"Unknown option '{key}' in {file}. Here it is tls-certificate."
        assert sentence in refusal(capsys, "serve", "demo", "--config", str(file))


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in ("serve", *cli.OTHER_COMMANDS, *cli.SMALL_COMMANDS))


def test_missing_argument_of_another_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "diff"]) == 2
    assert capsys.readouterr().err == "oaiserve bench: A is missing. See 'oaiserve bench diff --help'.\n"


def test_a_command_that_moved_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", "a.jsonl", "b.jsonl", "--no-table"]) == 2
    assert "Here it is oaiserve bench diff, which compares two recordings." in capsys.readouterr().err
    assert not OUR_COMMANDS.keys() & {"serve", *cli.OTHER_COMMANDS, *cli.SMALL_COMMANDS}


@pytest.mark.parametrize("model", ["demo", "gpt2", "Qwen/Qwen3-0.6B", "."])
def test_a_model_may_be_demo_a_hub_id_or_a_folder(
    served: Served, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").touch()
    assert serve(served, model=model).model == model


def test_a_busy_port_is_refused_before_the_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sentence = refusal(capsys, "serve", "demo", "--port", str(port))
    assert f"Cannot listen on 127.0.0.1 port {port}: Address already in use." in sentence


@pytest.mark.parametrize("host", ["192.0.2.77", "a" * 64])
def test_wrong_host_is_answered_with_the_addresses_of_the_machine(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refusal(capsys, "serve", "demo", "--host", host)
    assert "Choose an address of this machine with --host, which has 127.0.0.1" in sentence
    assert "--port" not in sentence


def test_clients_cannot_connect_while_the_model_loads_and_the_exit_code_is_the_servers() -> None:
    def connect(config: Config, sock: socket.socket) -> int:
        with socket.socket() as client:
            return client.connect_ex(sock.getsockname())

    assert cli.main(["serve", "demo", *FREE_PORT], connect) == errno.ECONNREFUSED


def test_a_start_that_fails_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: Config, sock: socket.socket) -> int:
        raise StartupError("The weights\nare gone.")

    assert cli.main(["serve", "demo", *FREE_PORT], fail) == 2
    assert capsys.readouterr().err == "oaiserve: The weights are gone.\n"


def test_closed_streams_are_opened_before_anything_writes_to_them() -> None:
    code = """
import os, sys
from oaiserve import cli
cli.main(["--version"])
print(*(os.readlink(f"/proc/self/fd/{number}") for number in (0, 2)))
sys.stderr.write("An error")
"""
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, code]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n/dev/null /dev/null\n")


def test_a_folder_that_has_been_removed_is_named_as_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["serve", "org/demo"]) == 2
    assert capsys.readouterr().err == "oaiserve: The current folder has been removed. Change to another one.\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"], Served()) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_make_serve_lets_args_name_the_port() -> None:
    command = ["make", "--dry-run", "--old-file", "setup", "serve", "PORT=8001", "ARGS=--port 9"]
    recipe = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert recipe.count("--port") == 1
    assert "OAISERVE_PORT=8001 " in recipe


def test_make_setup_says_first_that_a_compiler_is_missing(tmp_path: Path) -> None:
    for program in ("python3", "venv/bin/python", "clang++"):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o700)
    (tmp_path / "touch").symlink_to(shutil.which("touch") or "")
    command = [shutil.which("make") or "make", "setup", "PYTHON=python3", f"VENV={tmp_path}/venv"]

    def first_line() -> str:
        (tmp_path / "venv/.installed").unlink(missing_ok=True)
        done = subprocess.run(command, env={"PATH": str(tmp_path)}, check=True, capture_output=True, text=True)
        return done.stdout.splitlines()[0]

    assert first_line().startswith("Installing oaiserve")
    (tmp_path / "clang++").unlink()
    assert first_line().endswith("Install g++ for native code.")


@pytest.mark.parametrize(
    ("flags", "reads_config"),
    [
        (["--generation-config", "auto"], True),
        (["--generation-config=auto"], True),
        (["--generation-config", "vllm"], False),
        (["--generation-config=vllm"], False),
        (["--no-generation-config"], False),
    ],
)
def test_generation_config_takes_the_words_of_vllm(flags: list[str], reads_config: bool) -> None:
    served = Served()
    assert cli.main(["serve", "demo", "--port", "0", *flags], served) == 0
    assert (served.config.model, served.config.engine.generation_config) == ("demo", reads_config)


@pytest.mark.parametrize("value", ["{temperature = 0.2, top_k = 5}", "'temperature=0.2,top_k=5'"])
def test_default_params_may_be_a_table_of_the_config_file(value: str, tmp_path: Path) -> None:
    served = Served()
    path = tmp_path / "config.toml"
    path.write_text(f"port = 0\ndefault-params = {value}\n")
    assert cli.main(["serve", "demo", "--config", str(path)], served) == 0
    assert given_defaults(served.config.server.default_params) == {"temperature": 0.2, "top_k": 5}


@OF_GATEWAY
def test_missing_file_in_the_table_of_a_model_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[models.a]\nmodel = "demo"\nchat-template = "no-such.jinja"\n')
    assert "--chat-template is 'no-such.jinja'" in refusal(capsys, "serve", "--config", str(path), *FREE_PORT)
