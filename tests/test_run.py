"""The process of a server: its banner, signals while it loads and serves, and crashes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from oaiserve.checkpoints import demo
from oaiserve.commands import model_banner
from oaiserve.commands.listening import listen
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.errors import StartupError
from oaiserve.run import _engine


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("OAISERVE_"):
            monkeypatch.delenv(name)


SERVE_A_TINY_APP = """
import signal
import sys
from oaiserve import cli
from oaiserve.commands import banner as banners
from oaiserve.commands import model_banner
from oaiserve.http.connections import allowed_connections
from oaiserve.commands.listening import run_until_signal
from oaiserve.runtime import THREADS
from oaiserve.telemetry import logs

hangs = "--hangs" in sys.argv

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        for _ in range(2):
            message = (await receive())["type"]
            print(message, file=sys.stderr, flush=True)
            if hangs and message == "lifespan.shutdown":
                await receive()  # this message never arrives
            await send({"type": message + ".complete"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

def serve_app(config, sock):
    if not hangs:
        logs.configure(config.server.log_level, config.server.log_format)
    banner = model_banner.of_server(config, sock.getsockname()[1], "generate", {})
    run_until_signal(app, config, sock, allowed_connections(config.server, THREADS.clock_ns), banner)
    return 0

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` would have it ignored
sys.exit(cli.main(["serve", "demo", "--port", "0", *sys.argv[1 + hangs :]], serve_app))
"""


@pytest.mark.parametrize(
    ("number", "form"), [(signal.SIGTERM, "console"), (signal.SIGINT, "json"), (signal.SIGHUP, "console")]
)
def test_a_server_says_where_it_is_and_a_signal_ends_it_with_exit_code_0(number: signal.Signals, form: str) -> None:
    command = [sys.executable, "-c", SERVE_A_TINY_APP, "--log-format", form]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = (json.loads(line)["message"] if form == "json" else line for line in process.stderr)
        banner = next(line for line in lines if line.startswith("oaiserve"))
        url = banner.split(" at ")[1].strip()
        assert urllib.request.urlopen(url).read() == b"ok"
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == 0
    assert "Traceback" not in rest


@pytest.mark.parametrize(
    ("options", "page", "warns"),
    [
        ({}, "http://127.0.0.1:8000/", False),
        ({"host": "0.0.0.0", "open_dashboard": True}, "http://127.0.0.1:8000/", True),
        ({"host": "0.0.0.0"}, "closed: give --api-key", False),
    ],
)
def test_the_banner_has_the_address_of_the_page_and_the_log_warns_where_it_is_opened(
    options: dict[str, Any], page: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config("demo", ServerOptions(**options))
    banner = model_banner.of_server(config, 8000, "generate", {})
    assert banner.facts["Chat"].startswith(page)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        listen(config, sock, banner)
    assert ("see all requests, but not their text" in caplog.text) == warns


LOAD_FOR_EVER = """
import signal
import sys
import time
from oaiserve import cli
from oaiserve.engine.engine import Engine
from oaiserve.checkpoints import demo

def load(*_, **__):
    print("loading", file=sys.stderr, flush=True)
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass  # as in a callback, where Python prints what is raised, and goes on

demo.fetched = lambda: None
Engine.from_pretrained = load
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs in the background ignore it
cli.main(["serve", "demo", "--port", "0"])
"""


def test_ctrl_c_ends_a_server_whose_model_loads_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", LOAD_FOR_EVER], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any(line == "loading\n" for line in process.stderr)
            process.send_signal(signal.SIGINT)
            assert process.wait() == -signal.SIGINT
        finally:
            process.kill()
        assert process.stderr.read() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_the_first_process_of_a_container_while_its_model_loads(number: signal.Signals) -> None:
    """The kernel drops signals that such a process doesn't handle. Here it only believes to be one."""
    first = f"import os\nos.getpid = lambda: 1\n{LOAD_FOR_EVER}"
    with subprocess.Popen([sys.executable, "-c", first], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any(line == "loading\n" for line in process.stderr)
            process.send_signal(number)
            assert process.wait() == 128 + number
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("OTEL_TRACES_SAMPLER", "foo", "An OTEL_ variable has a value that OpenTelemetry rejects: OTEL_TRACES_SAMPLER"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many", "OTEL_BSP_MAX_QUEUE_SIZE is 'many', but must be a whole number"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER is 'zipkin'; this server supports"),
    ],
)
def test_wrong_variable_of_traces_is_found_before_the_model_loads(variable: str, value: str, says: str) -> None:
    environment = os.environ | {"OTEL_TRACES_EXPORTER": "console", variable: value}
    command = [sys.executable, "-c", LOAD_FOR_EVER]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert f"oaiserve: {says}" in done.stderr
    assert not re.search(r"\b[Ll]oading\b", done.stderr)


def test_crash_leaves_the_signal_and_the_stacks_in_the_log() -> None:
    crashing = LOAD_FOR_EVER.replace("while True:", "signal.raise_signal(signal.SIGBUS)\n    while True:")
    done = subprocess.run([sys.executable, "-c", crashing], stderr=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr
    assert "in load" in done.stderr


def test_a_third_signal_ends_a_shutdown_that_hangs() -> None:
    command = [sys.executable, "-c", SERVE_A_TINY_APP, "--hangs"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "lifespan.startup" not in (line := process.stderr.readline()):
            assert line
        process.terminate()
        while "lifespan.shutdown" not in (line := process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        process.terminate()
        rest = process.stderr.read()
    assert (process.returncode, rest) == (1, "")


def test_all_that_the_demos_first_start_waits_for_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    times = StartTimes()
    named = []

    def fetch() -> None:
        named.append(times.current)
        raise StartupError("no network")

    monkeypatch.setattr(demo, "is_fetched", lambda: False)
    monkeypatch.setattr(demo, "fetched", fetch)
    monkeypatch.setattr("oaiserve.engine.start.plan.compile_early", lambda *_: named.append(times.current))
    with pytest.raises(StartupError, match="no network"):
        _engine(Config("demo"), times, [], [])
    assert named == ["start of the compiler", "files of the demo"]
