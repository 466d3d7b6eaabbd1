"""A server process is started, timed and stopped, with all that it has started itself."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tools.bench.process_usage import cpu_seconds, peak_rss_mib, tree
from tools.bench.servers import ServerSpec
from tools.server_process import QUESTION, ServerProcess, StartFailed, exit_on_sigterm, free_port, running_process

# Answers GET from the second time on, and POST at once. It has a child that ends by itself only when it is told to.
SERVE = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

class Answer(BaseHTTPRequestHandler):
    statuses = iter([503])

    def do_GET(self):
        self.answer(next(self.statuses, 200))

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(200)

    def answer(self, status):
        self.send_response(status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

print("ready at last", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Answer).serve_forever()
"""


def serving(code: str, **options: Any) -> AbstractContextManager[ServerProcess]:
    port = free_port()
    return running_process([sys.executable, "-c", code, str(port)], port, **options)


def is_alive(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except ProcessLookupError:
        return False


@pytest.mark.parametrize("stop_limit_seconds", [20, 0])
def test_a_server_runs_within_the_block_and_is_gone_with_its_children_after_it(stop_limit_seconds: float) -> None:
    with serving(SERVE, stop_limit_seconds=stop_limit_seconds) as server:
        server.wait_for_log("ready at .ast", 20)
        pids = tree(server.process.pid)
        assert len(pids) == 2
        assert server.start_seconds > 0
        assert peak_rss_mib(server.process.pid) > 5
        assert cpu_seconds(server.process.pid) > 0
    assert not any(is_alive(pid, group=pids[0]) for pid in pids)
    assert not server.log_file.exists()


def test_a_server_is_ready_when_it_answers_with_success(tmp_path: Path) -> None:
    with serving(SERVE, log_file=tmp_path / "get") as server:
        pass
    assert [line.split()[-2] for line in server.log_file.read_text().splitlines() if "GET /ready" in line] == [
        "503",
        "200",
    ]
    with serving(SERVE, log_file=tmp_path / "post", ready_path="/ask", question=QUESTION) as server:
        pass
    assert server.log_file.read_text().count("POST /ask") == 1


def test_a_server_that_ends_at_once_is_reported_with_the_end_of_its_log() -> None:
    with (
        pytest.raises(StartFailed, match="it ended with exit code 1: no model here"),
        serving("import sys; sys.exit('no model here')"),
    ):
        pass


def test_a_server_that_does_not_get_ready_is_reported_and_stopped() -> None:
    code = SERVE.replace("iter([503])", "iter([503] * 10_000)") + "# a mark of this test"
    with (
        pytest.raises(StartFailed, match="it is not ready within 1 s, "),
        serving(code, start_limit_seconds=1),
    ):
        pass
    assert not [line for line in command_lines() if "a mark of this test" in line]


def command_lines() -> list[str]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_text())
        except OSError:
            continue
    return lines


def test_a_server_does_not_outlive_a_tool_that_is_terminated() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        exit_on_sigterm()
        with pytest.raises(SystemExit, match="143"), serving(SERVE) as server:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert tree(server.process.pid) == [server.process.pid]  # no children, and its own entry is gone, too
    assert not Path(f"/proc/{server.process.pid}").exists()


def test_a_command_is_shown_without_folders() -> None:
    shown = ServerSpec("test", "1", ("/a/b/serve", "/c/model", "--name", "x y"), ())
    assert shown.shown() == "serve model --name 'x y'"
    assert shown.command(8)[-2:] == ["--port", "8"]
