"""Tools are started so that they ask a server here. A stub in their place tells how."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oaiserve import cli
from oaiserve.commands.client import Client
from oaiserve.commands.servers import announced
from oaiserve.plugins.terminal.agents import AGENTS
from tests.agents.scripted import ScriptedServer
from tests.serving import Serve
from tests.waiting import LIMIT_SECONDS

STUB = f"""#!{sys.executable}
import json, os, sys
names = [name for name in os.environ if name.endswith(("_SETTINGS_PATH", "_MODEL_CATALOG"))]
files = {{name: open(os.environ[name]).read() for name in names}}
json.dump([sys.argv[1:], dict(os.environ), files], open(os.environ["TOLD"], "w"))
sys.exit(7)
"""


class Stubs:
    """Stubs of all tools, the only programs on PATH, and what one was started with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = folder / "home"
        self._told = folder / "told"
        programs = folder / "bin"
        for new_folder in (self.home, programs):
            new_folder.mkdir()
        for agent in AGENTS.values():
            (programs / agent.program).write_text(STUB)
            (programs / agent.program).chmod(0o755)
        for name, value in {"HOME": self.home, "PATH": programs, "TOLD": self._told}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def told(self) -> list[Any]:
        return json.loads(self._told.read_text())


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    return Stubs(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", AGENTS)
def test_a_tool_is_told_the_server_its_model_and_the_key(
    name: str, server: ScriptedServer, stubs: Stubs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "its-key")
    with announced(server.url, "demo"):
        assert cli.main(["launch", name, "--", "run", "--fast"]) == 7
    assert f"uses demo at {server.url}, the server that started last here" in capsys.readouterr().err
    arguments, environment, files = stubs.told()
    assert arguments[-2:] == ["run", "--fast"]
    new = {variable: value for variable, value in environment.items() if value != os.environ.get(variable)}
    everything = json.dumps([arguments, new, list(files.values())])
    assert server.url in everything
    assert "demo" in everything
    assert "its-key" in json.dumps([environment, files])
    assert not any(Path(environment[variable]).exists() for variable in files)  # any more
    assert list(stubs.home.iterdir()) == []


@pytest.mark.parametrize("flag", ["--lean", "--no-lean"])
def test_what_is_shown_starts_the_tool_in_the_same_way(
    flag: str, server: ScriptedServer, stubs: Stubs, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in AGENTS:
        cli.main(["launch", name, "--url", server.url, flag, "it's"])
        arguments, environment, files = stubs.told()
        assert cli.main(["launch", name, "--url", server.url, flag, "--show", "it's"]) == 0
        shown = capsys.readouterr().out
        path = f"PATH=$PATH:{shlex.quote(os.defpath)}\n"  # for cat
        subprocess.run(["/bin/sh", "-c", path + shown], cwd=tmp_path)
        again = stubs.told()
        of_file = environment.get("CODEX_MODEL_CATALOG", "no such file")
        assert again[0] == [argument.replace(of_file, "codex.json") for argument in arguments]
        assert {k: v.strip() for k, v in again[2].items()} == {k: v.strip() for k, v in files.items()}
        for variable in AGENTS[name].environment:
            assert again[1][variable] == environment[variable]


def test_a_tool_of_a_server_on_a_cpu_gets_short_prompts(
    server: ScriptedServer, stubs: Stubs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_example(name: str, *flags: str) -> bool:
        cli.main(["launch", name, "--url", server.url, *flags])
        arguments, environment, files = stubs.told()
        for content in [*files.values(), environment.get("OPENCODE_CONFIG_CONTENT", "{}")]:
            json.loads(content)
        return "cat > five.py" in json.dumps([arguments, environment, files])

    for name, agent in AGENTS.items():
        assert has_example(name, "--lean") is (agent.lean is not None)
        assert not has_example(name)
    assert capsys.readouterr().err == ""
    served = Client(server.url).model(None)
    monkeypatch.setattr(Client, "model", lambda self, name: served._replace(device="cpu"))
    assert has_example("codex")
    assert "so Codex gets a short prompt and few tools" in capsys.readouterr().err
    assert not has_example("codex", "--no-lean")


@pytest.mark.parametrize(
    ("arguments", "settings", "may_write"),
    [
        (["exec", "Fix the test"], "", True),
        (["-m", "other", "e", "Fix the test"], 'model = "other"', True),
        (["exec", "-s", "read-only", "Fix the test"], "", False),
        (["exec", "--sandbox=danger-full-access", "Fix the test"], "", False),
        (["exec", "-c", "sandbox_mode=read-only", "Fix the test"], "", False),
        (["exec", "Fix the test"], 'sandbox_mode = "read-only"', False),
        (["resume"], "", False),
    ],
)
def test_codex_may_write_when_it_does_a_task_alone_unless_the_user_has_decided(
    arguments: list[str],
    settings: str,
    may_write: bool,
    server: ScriptedServer,
    stubs: Stubs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (stubs.home / ".codex").mkdir()
    (stubs.home / ".codex" / "config.toml").write_text(settings)
    assert cli.main(["launch", "codex", "--url", server.url, "--", *arguments]) == 7
    started = stubs.told()[0]
    assert started[-len(arguments) :] == arguments
    assert ('sandbox_mode="workspace-write"' in started) is may_write
    assert ("Codex may write to this folder." in capsys.readouterr().err) is may_write


@pytest.mark.parametrize(
    ("name", "arguments", "says", "command"),
    [
        ("claude", ["-p", "Fix it"], "only what its settings allow", "-p 'Fix it' --allowedTools Bash,Write,Edit,Read"),
        ("claude", ["Fix it", "--print"], "nobody answers", "'Fix it' --print --allowedTools Bash,Write,Edit,Read"),
        ("qwen-code", ["-p", "Fix it"], "may not write files or run commands", "-p 'Fix it' -y"),
        ("qwen-code", ["Fix it"], "may not write files or run commands", "'Fix it' -y"),
        ("opencode", ["run", "Fix it"], "without asking", "run 'Fix it'"),
        ("cline", ["Fix it"], "without asking", "'Fix it' --auto-approve false"),
        ("aider", ["--message", "Fix it"], "runs the commands", "--message 'Fix it' --no-suggest-shell-commands"),
    ],
)
def test_tool_that_works_alone_starts_after_a_line_with_its_rights_and_gets_none_by_itself(
    name: str,
    arguments: list[str],
    says: str,
    command: str,
    server: ScriptedServer,
    stubs: Stubs,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["launch", name, "--url", server.url, "--", *arguments]) == 7
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert line.endswith(f"oaiserve launch {name} --url {server.url} -- {command}")
    assert stubs.told()[0][-len(arguments) :] == arguments
    assert "OPENCODE_PERMISSION" not in stubs.told()[1]
    # The line that is printed is one that decides, so that following it prints nothing more.
    variables, _, words = line.partition(": ")[2].partition("oaiserve ")
    environment = dict(word.split("=", 1) for word in shlex.split(variables))
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in environment.items():
            patch.setenv(variable, value)
        assert cli.main(shlex.split(words)) == 7
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("claude", []),
        ("claude", ["-p", "Fix it", "--permission-mode=acceptEdits"]),
        ("claude", ["--dangerously-skip-permissions", "-p", "Fix it"]),
        ("qwen-code", ["--model", "other"]),
        ("qwen-code", ["--approval-mode", "auto-edit", "-p", "Fix it"]),
        ("opencode", []),
        ("cline", ["--tui"]),
        ("aider", ["add.py"]),
        ("aider", ["--yes-always", "--message", "Fix it"]),
    ],
)
def test_nothing_is_said_of_rights_where_a_user_answers_or_has_decided(
    name: str, arguments: list[str], server: ScriptedServer, stubs: Stubs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", name, "--url", server.url, "--", *arguments]) == 7
    assert capsys.readouterr().err == ""


def test_short_prompt_has_a_failed_result_with_its_repair_and_no_last_answer(
    server: ScriptedServer, stubs: Stubs
) -> None:
    for name, agent in AGENTS.items():
        if agent.lean is None:
            continue
        cli.main(["launch", name, "--url", server.url, "--lean"])
        arguments, environment, files = stubs.told()
        texts = [*arguments, *environment.values(), *files.values()]
        (text,) = (text for text in texts if "cat > five.py" in text)
        assert text.count("<tool_call>") == 2
        assert "python: command not found" in text.partition("<tool_call>")[2].rpartition("<tool_call>")[0]
        after = text.rpartition("</tool_call>")[2]
        assert " I " not in after


def test_codex_reads_only_what_a_shell_pipes_into_its_task(server: ScriptedServer, stubs: Stubs) -> None:
    stub = stubs.home.parent / "bin" / "codex"
    stub.write_text(f"#!{sys.executable}\nimport sys\nprint('read:', sys.stdin.read())\n")
    command = [sys.executable, "-m", "oaiserve", "launch", "codex", "--url", server.url, "--", "exec", "Fix the test"]
    piped = subprocess.run(command, input="a log", capture_output=True, text=True)
    assert piped.stdout == "read: a log\n"
    ours, open_end = socket.socketpair()
    with ours, open_end:
        left_open = subprocess.run(command, stdin=ours, capture_output=True, text=True)
    assert left_open.stdout == "read: \n"


def test_tool_can_be_named_by_its_program(server: ScriptedServer, stubs: Stubs) -> None:
    assert cli.main(["launch", "qwen", "--url", server.url]) == 7
    assert stubs.told()[0][:2] == ["--auth-type", "openai"]


def test_a_tool_that_is_not_there_has_the_command_that_installs_it(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert cli.main(["launch", "claude", "--url", server.url]) == 2
    assert "To install it: npm install -g @anthropic-ai/claude-code" in capsys.readouterr().err


def test_what_cannot_be_launched_is_said(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in (
        (["emacs"], "It must be one of codex, claude,"),
        (["codx"], "Did you mean codex?"),
        (["codex"], "No server is running here"),
        (["codex", "--url", server.url, "--model", "other"], "has no model 'other': it has demo."),
    ):
        assert cli.main(["launch", *arguments]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("key", [None, "another"])
def test_refused_key_names_the_variable_that_has_it(
    key: str | None, serve: Serve, stubs: Stubs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if key is not None:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    assert cli.main(["launch", "codex", "--url", serve(api_key=("its-key",)).url]) == 2
    message = capsys.readouterr().err
    assert "answers 401" in message
    assert ("OPENAI_API_KEY is not set" in message) is (key is None)
    assert ("the key in OPENAI_API_KEY" in message) is (key is not None)


def test_without_a_tool_all_are_listed_with_the_next_step(
    server: ScriptedServer, stubs: Stubs, capsys: pytest.CaptureFixture[str]
) -> None:
    (stubs.home.parent / "bin" / "aider").unlink()
    assert cli.main(["launch"]) == 0
    _, *rows, _, next_step = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == list(AGENTS)
    assert rows[0].split() == ["codex", "Codex", "yes"]
    assert rows[-1].endswith("no         uv tool install aider-chat")
    assert next_step == "No server is running here. Start one first, as in: oaiserve serve demo"
    with announced(server.url, "demo"):
        assert cli.main(["launch"]) == 0
    assert capsys.readouterr().out.endswith(f"To start one with demo at {server.url}: oaiserve launch TOOL\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_tool_and_removes_its_files(
    number: signal.Signals, server: ScriptedServer, stubs: Stubs, tmp_path: Path
) -> None:
    stub = stubs.home.parent / "bin" / "cline"
    stub.write_text(f"#!{sys.executable}\nimport os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    (folder := tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "oaiserve", "launch", "cline", "--url", server.url]
    environment = {**os.environ, "TMPDIR": str(folder)}

    def receive() -> None:  # Under nohup, the tests ignore SIGHUP, and so would what they start.
        signal.signal(number, signal.SIG_DFL)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=receive) as process:
        assert process.stdout is not None
        tool = int(process.stdout.readline())
        assert [path.name for path in folder.glob("oaiserve-*/*")] == ["cline_provider_settings_path.json"]
        process.send_signal(number)
        assert process.wait(LIMIT_SECONDS) == 128 + number
    assert list(folder.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(tool, 0)
