"""Tests POST /debug/profile: the trace as a download, its errors, and the conditions under which it is served."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions, TelemetryOptions
from oaiserve.errors import Conflict, Unavailable
from oaiserve.facts.record import Profile
from tests.routes.asking import refused
from tests.routes.conftest import RunningServer, Serve, running_server
from tests.routes.doubles import FakeEngine, FakeTelemetry

WAIT_SECONDS = 60
TRACE = b"a trace"


class Recorded:
    """A recording whose `save` writes a trace, or raises an error."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.path: Path | None = None

    def save(self, path: Path) -> None:
        if self.error is not None:
            raise self.error
        self.path = path
        path.write_bytes(TRACE)


class Profiled:
    """A server that makes profiles. The test sets the engine's answer while the client waits."""

    def __init__(self, url: str, server: RunningServer, engine: FakeEngine, threads: ThreadPoolExecutor) -> None:
        self.url, self.server, self.engine, self.threads = url, server, engine, threads

    def ask(self, query: str = "") -> Future[httpx.Response]:
        return self.threads.submit(httpx.post, f"{self.url}/debug/profile{query}", timeout=WAIT_SECONDS)

    def asked(self) -> tuple[int, float, Future[Profile]]:
        return self.engine.profiles.get(timeout=WAIT_SECONDS)

    def answered(
        self, query: str, num_steps: int, duration_ns: int = 1, error: OSError | None = None
    ) -> httpx.Response:
        """Ask, let the engine record so many steps, and return the answer."""
        answer = self.ask(query)
        self.asked()[2].set_result(Profile(Recorded(error), num_steps, duration_ns))
        return answer.result(WAIT_SECONDS)


@pytest.fixture
def profiled(tmp_path: Path) -> Iterator[Profiled]:
    engine = FakeEngine()
    config = Config("demo", ServerOptions(drain_timeout_seconds=5), telemetry=TelemetryOptions(profile_dir=tmp_path))
    app = create_app(config, engine, FakeTelemetry())
    with ThreadPoolExecutor() as threads, running_server(app, config.server) as (url, server):
        yield Profiled(url, server, engine, threads)


@pytest.mark.parametrize(("query", "num_steps", "seconds"), [("?steps=7&seconds=9", 7, 9), ("", 20, 30)])
def test_the_trace_is_the_answer_and_is_saved_in_the_folder(
    profiled: Profiled, tmp_path: Path, caplog: pytest.LogCaptureFixture, query: str, num_steps: int, seconds: int
) -> None:
    caplog.set_level("INFO", "oaiserve.routes.debug")
    answer = profiled.ask(query)
    *asked_for, asked = profiled.asked()
    assert asked_for == [num_steps, seconds]
    asked.set_result(Profile(Recorded(), 3, 2_000_000_000))
    response = answer.result(WAIT_SECONDS)
    assert (response.status_code, response.content) == (200, TRACE)
    assert response.headers["content-type"] == "application/gzip"
    assert response.headers["x-profile-steps"] == "3"
    (file,) = tmp_path.iterdir()
    assert file.read_bytes() == TRACE
    assert file.name.endswith(f"-3-of-{num_steps}-steps.json.gz")
    assert response.headers["content-disposition"] == f'attachment; filename="{file.name}"'
    assert [line.message for line in caplog.records] == [f"A profile of 3 of {num_steps} steps, in 2.000 s: {file}"]


def test_a_profile_without_a_step_is_an_error_that_says_what_to_do(profiled: Profiled, tmp_path: Path) -> None:
    response = profiled.answered("?seconds=1", 0)
    refused(response, None, "No step came within 1 seconds. Send requests while the profile is made.", status=408)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [Conflict("A profile is being made already."), Unavailable("The engine has ended.")])
def test_an_error_of_the_engine_reaches_the_client(error: Conflict | Unavailable, profiled: Profiled) -> None:
    answer = profiled.ask()
    profiled.asked()[2].set_exception(error)
    response = answer.result(WAIT_SECONDS)
    refused(response, None, error.message, status=error.status)


def test_a_trace_is_for_this_user_only_whatever_the_umask(profiled: Profiled, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert profiled.answered("", 3).content == TRACE
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_trace_that_cannot_be_written_is_the_servers_fault(
    profiled: Profiled, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert profiled.answered("", 3, error=OSError(28, "No space left on device")).status_code == 500
    assert "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("query", "param", "says"),
    [
        ("?steps=0", "steps", "must be an integer from 1 to 1000, got '0'"),
        ("?steps=1001", "steps", "must be an integer from 1 to 1000"),
        ("?steps=ten", "steps", "must be an integer from 1 to 1000"),
        ("?seconds=601", "seconds", "must be an integer from 1 to 600"),
        ("?step=3", "step", "this route takes steps, seconds"),
    ],
)
def test_a_malformed_query_is_refused(profiled: Profiled, query: str, param: str, says: str) -> None:
    response = profiled.ask(query).result(WAIT_SECONDS)
    refused(response, param, says)
    assert profiled.engine.profiles.empty()


def test_a_client_that_leaves_ends_its_profile(profiled: Profiled, tmp_path: Path) -> None:
    port = int(profiled.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST /debug/profile HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
        _, _, asked = profiled.asked()
    assert profiled.engine.ended_profiles.get(timeout=WAIT_SECONDS) is asked
    saved = threading.Event()

    class Unwanted(Recorded):
        def save(self, path: Path) -> None:
            saved.set()

    asked.set_result(Profile(Unwanted(), 3, 1))
    # The server makes another profile, and by then it has not written the first one.
    assert profiled.answered("", 1).status_code == 200
    assert not saved.is_set()


def test_a_server_that_shuts_down_ends_the_profile_and_answers_with_what_it_has(profiled: Profiled) -> None:
    answer = profiled.ask()
    _, _, asked = profiled.asked()
    profiled.server.should_exit = True
    assert profiled.engine.ended_profiles.get(timeout=WAIT_SECONDS) is asked
    asked.set_result(Profile(Recorded(), 2, 1))
    response = answer.result(WAIT_SECONDS)
    assert (response.status_code, response.headers["x-profile-steps"]) == (200, "2")


def test_a_profile_that_is_cut_off_by_the_shutdown_is_ended_too(tmp_path: Path) -> None:
    engine = FakeEngine()
    config = Config("demo", ServerOptions(drain_timeout_seconds=0), telemetry=TelemetryOptions(profile_dir=tmp_path))
    app = create_app(config, engine, FakeTelemetry())
    with ThreadPoolExecutor() as threads, running_server(app, config.server) as (url, server):
        answer = Profiled(url, server, engine, threads).ask()
        _, _, asked = engine.profiles.get(timeout=WAIT_SECONDS)
        server.should_exit = True
        assert engine.ended_profiles.get(timeout=WAIT_SECONDS) is asked
        assert answer.result(WAIT_SECONDS).status_code == 503
    asked.set_result(Profile(Recorded(), 2, 1))  # no request waits for it any more


def test_profiles_need_a_folder_and_either_a_key_or_loopback(serve: Serve) -> None:
    says = "Profiles are made only where the server was started with --profile-dir FOLDER."
    refused(serve().http.post("/debug/profile"), None, says, status=404)
    assert serve().http.get("/debug/profile").status_code == 405
    assert serve(host="0.0.0.0").http.post("/debug/profile").status_code == 404
    assert serve(host="0.0.0.0", api_key=("secret",)).http.post("/debug/profile").status_code == 401
