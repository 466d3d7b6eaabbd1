"""What counts a newcomer's first hour, without a network: its commands, its environment, and its steps."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.bench import newcomer
from tools.bench.newcomer import Step, StepFailed, bare_environment, counted, newcomers_steps, report, typed

LIMIT_SECONDS = 60
STAYS = "exec sleep 600"


def is_running(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


def test_each_command_is_one_of_the_documentation() -> None:
    commands = [step.command for step in newcomers_steps(Path("/models/own model.gguf"))]
    begins = [
        "make serve",
        "",
        "curl http",
        ".venv/bin/python -c 'from openai",
        ".venv/bin/oaiserve serve '/models/own",
    ]
    assert [command[: len(begin)] for command, begin in zip(commands, begins, strict=False)] == begins
    assert "of France?" in commands[2]
    assert '"model": "own model"' in commands[5]
    assert commands[6].endswith("/debug/requests/REQUEST_ID'")
    with pytest.raises(ValueError, match="README.md has no command"):
        typed("README.md", "make coffee")


def test_compilers_are_left_out_of_a_bare_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    for name in ("make", "g++", "x86_64-linux-gnu-gcc-12", "cc", "clang++-14", "clang-format", "python3"):
        (installed / name).touch()
    monkeypatch.setattr(os, "environ", {"PATH": str(installed), "CXX": "g++", "HOME": "/root", "PIP_CERT": "file"})
    for compiler, kept in {False: 3, True: 7}.items():
        folder = tmp_path / str(compiler)
        folder.mkdir()
        environment = bare_environment(folder, compiler=compiler)
        programs = {path.name for path in Path(environment["PATH"]).iterdir()}
        assert len(programs) == kept
        assert {"make", "clang-format", "python3"} <= programs
        assert environment.keys() == {"PIP_CERT", "PATH", "HOME", "PORT", "OAISERVE_PORT"}
        assert not any(Path(environment["HOME"]).iterdir())


def test_steps_end_with_their_output_and_servers_with_the_next_one(tmp_path: Path) -> None:
    steps = [
        Step("it is installed", f"echo $$ > first; echo Loading; echo ready at $PORT; {STAYS}", "Loading", True),
        Step("it is ready", "", "ready at 81"),
        Step("an answer", "test -e first && echo 'x-request-id: req-7' 127.0.0.1:8000", "127.0.0.1:81$"),
        Step("another server", f"echo $$ > second; echo ready; {STAYS}", "ready", True),
        Step("its explanation", "echo REQUEST_ID", "req-7"),
    ]
    environment = {"PATH": os.environ["PATH"], "PORT": "81"}
    rows = []
    for row in counted(steps, tmp_path, environment, LIMIT_SECONDS):
        rows.append(row)
        if (second := tmp_path / "second").exists():
            assert not is_running(tmp_path / "first")
            assert is_running(second)
    assert [row["until"] for row in rows] == [step.until for step in steps]
    assert not is_running(second)
    shown = report({"runs": [{"compiler": False, "steps": rows}], "machine": "A CPU", "created": "today", "model": "m"})
    assert "| an answer | `test -e …` | " in shown
    assert "| all, with 4 commands |  | **" in shown


def test_a_command_that_ends_otherwise_fails_the_step_with_its_output(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PORT": "81"}
    with pytest.raises(StepFailed, match=r"(?s)an answer: .* ended with exit code 3: no such model"):
        list(counted([Step("an answer", "echo no such model; exit 3", "Paris")], tmp_path, environment, LIMIT_SECONDS))
    with pytest.raises(StepFailed, match="took too long"):
        list(counted([Step("an answer", STAYS, "Paris")], tmp_path, environment, 0))


def test_ctrl_c_stops_what_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_files = [tmp_path / "server", tmp_path / "client"]
    pid_files[1].touch()
    steps = [
        Step("the demo is ready", f"echo $$ > server; echo ready; {STAYS}", "ready", True),
        Step("an answer", f"echo $$ > client; {STAYS}", "Paris"),
    ]

    def ctrl_c(_seconds: float) -> None:
        if pid_files[1].read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(newcomer, "time", SimpleNamespace(monotonic=time.monotonic, sleep=ctrl_c))
    with pytest.raises(KeyboardInterrupt):
        list(counted(steps, tmp_path, {"PATH": os.environ["PATH"], "PORT": "81"}, LIMIT_SECONDS))
    assert [is_running(file) for file in pid_files] == [False, False]
