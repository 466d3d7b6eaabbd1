"""A server is started, timed and ended, with all that it started itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tools.bench.process import StartFailed, exit_on_sigterm, running, tree
from tools.bench.servers import Server

SERVE = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

print("ready at last", flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Answer).serve_forever()
"""


def server(code: str) -> Server:
    return Server("test", "1", (sys.executable, "-c", code), ())


def test_it_is_up_within_the_block_and_gone_with_its_children_after_it(tmp_path: Path) -> None:
    with running(server(SERVE), tmp_path / "log") as process:
        process.wait_for_log("ready at .ast")
        pids = tree(process.pid)
        assert len(pids) == 2
        assert 0 < process.start_seconds <= process.seconds()
        assert process.peak_rss_mib() > 5
        assert process.cpu_seconds() > 0
    assert not any(Path(f"/proc/{pid}/cmdline").exists() and os.getpgid(pid) == pids[0] for pid in pids)


def test_one_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    failing = server("import sys; sys.exit('no model here')")
    with (
        pytest.raises(StartFailed, match="(?s)it ended with exit code 1: no model here"),
        running(failing, tmp_path / "log"),
    ):
        pass


def test_a_server_does_not_outlive_a_measurement_that_is_ended(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        exit_on_sigterm()
        with pytest.raises(SystemExit, match="143"), running(server(SERVE), tmp_path / "log") as process:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert tree(process.pid) == [process.pid]  # no children, and its own entry is gone, too
    assert not Path(f"/proc/{process.pid}").exists()


def test_a_command_is_shown_without_folders() -> None:
    shown = Server("test", "1", ("/a/b/serve", "/c/model", "--name", "x y"), ())
    assert shown.shown() == "serve model --name 'x y'"
    assert shown.command(8)[-2:] == ["--port", "8"]
