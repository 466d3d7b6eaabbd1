"""Front ends as processes: whoever is killed, nobody else is harmed, and nobody stays behind."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.e2e.conftest import STOP_SECONDS, LiveServer, serve_process
from tests.telemetry.pages import key, samples_on
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")

FLAGS = ("--front-ends", "2", "--kv-blocks", "1024")
WAIT_SECONDS = 60
# The command with a model that fails in the middle of a request with the seed 13.
FAILING = """
import sys
from oaiserve.cli import main
from oaiserve.engine.model.runner import ModelRunner

launch = ModelRunner.launch

def changed_launch(self, step):
    sequences = [chunk.sequence for chunk in step.chunks]
    if any(sequence.params.seed == 13 and sequence.num_generated == 3 for sequence in sequences):
        raise RuntimeError("the device is gone")
    return launch(self, step)

ModelRunner.launch = changed_launch
sys.exit(main())
"""


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("front_ends")
    flags = (*FLAGS, "--response-store", str(folder / "responses.db"))
    with serve_process(str(small_model), folder / "log", *flags) as server:
        yield server


def front_ends(server: LiveServer) -> list[int]:
    """Return the process ids of the front ends."""
    found = []
    for file in Path(f"/proc/{server.process.pid}/task").glob("*/children"):  # any thread may have started them
        found += [int(child) for child in file.read_text().split()]
    return [
        pid for pid in found if is_running(pid) and b"front_ends.process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def wait_until_running(server: LiveServer, number: int) -> None:
    wait_until(lambda: f"oaiserve_requests_running {number}.0" in httpx.get(f"{server.url}/metrics", timeout=60).text)


def wait_until_all_are_up(server: LiveServer) -> None:
    """Wait until both front ends get connections: a process is there before it has told the engine's of itself."""

    def are_up() -> bool:
        try:
            return "oaiserve_front_ends 2.0" in httpx.get(f"{server.url}/metrics", timeout=60).text
        except httpx.TransportError:  # a front end that is being killed has taken the connection
            return False

    wait_until(are_up)


def complete(url: str, request_id: str, **body: Any) -> list[Any]:
    """Return the events of a stream on a connection of its own; the last one is an error if it was cut."""
    events: list[Any] = []
    body = {"prompt": "Hi", "stream": True, "ignore_eos": True, "temperature": 0, "max_tokens": 20} | body
    headers = {"x-request-id": request_id}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=WAIT_SECONDS) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
    except httpx.TransportError as error:
        events.append(error)
    return events


def test_a_front_end_that_is_killed_is_started_again_and_loses_only_its_own_streams(server: LiveServer) -> None:
    wait_until_all_are_up(server)
    before = front_ends(server)
    assert len(before) == 2
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(complete, server.url, f"killed-{number}", max_tokens=2000) for number in range(6)]
        wait_until_running(server, 6)
        os.kill(before[0], signal.SIGKILL)
        answers = [one.result() for one in asked]
    cut = [events for events in answers if isinstance(events[-1], httpx.TransportError)]
    whole = [events for events in answers if not isinstance(events[-1], httpx.TransportError)]
    assert min(len(cut), len(whole)) > 0  # connections were shared out
    assert all(events[-1]["choices"][0]["finish_reason"] == "length" for events in whole)
    wait_until(lambda: len(front_ends(server)) == 2)
    assert set(front_ends(server)) != set(before)
    wait_until(lambda: "has ended by SIGKILL" in server.log_file.read_text())
    line = next(line for line in server.log() if "has ended by SIGKILL" in line["message"])
    assert line["message"].endswith(f"which have failed: {len(cut)}")
    after = [complete(server.url, f"after-{number}") for number in range(4)]
    assert all(events[-1]["choices"][0]["finish_reason"] == "length" for events in after)
    with server.http() as http:
        ended = http.get("/debug/requests", params={"outcome": "failed"}).json()["requests"]
        assert len(ended) == len(cut)
        wait_until_all_are_up(server)
        page = samples_on(http.get("/metrics").content)
    assert page[key("oaiserve_kv_blocks", state="used")] == page[key("oaiserve_requests_running")] == 0
    assert (page[key("oaiserve_front_ends")], page[key("oaiserve_front_ends_ended_total")]) == (2, 1)
    memory = [value for (name, _), value in page.items() if name == "oaiserve_front_end_resident_memory_bytes"]
    assert len(memory) == 2
    assert min(memory) > 2**20


def test_a_batch_goes_on_whichever_front_ends_are_killed(server: LiveServer) -> None:
    asked = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 16, "ignore_eos": True}}
    lines = b"".join(json.dumps({"custom_id": str(number), **asked}).encode() + b"\n" for number in range(1000))

    def num_completed() -> int:
        counts: dict[str, int] = sdk.batches.retrieve(batch.id).request_counts.to_dict()  # type: ignore[assignment]
        return counts["completed"]

    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=10) as sdk:
        file = sdk.files.create(file=("in.jsonl", lines), purpose="batch")
        batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        for number in range(3):
            wait_until_all_are_up(server)
            wait_until(lambda number=number: num_completed() > 200 * number)
            os.kill(front_ends(server)[number % 2], signal.SIGKILL)
        wait_until(lambda: sdk.batches.retrieve(batch.id).status == "completed")
        batch = sdk.batches.retrieve(batch.id)
        answers = [json.loads(text) for text in sdk.files.content(batch.output_file_id).text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [str(number) for number in range(1000)]


def test_front_ends_do_not_outlive_the_engine_process(server: LiveServer) -> None:
    left = front_ends(server)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(complete, server.url, "cut", max_tokens=15_000)
        wait_until_running(server, 1)
        server.process.kill()
        *_, error = asked.result()
    assert error["error"]["message"] == "The engine's process is gone; the server must be restarted."
    wait_until(lambda: not any(map(is_running, left)))


def test_an_engine_that_fails_ends_all_processes_with_exit_code_1(small_model: Path, tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    with serve_process(str(small_model), log_file, *FLAGS, program=("-c", FAILING)) as server:
        left = front_ends(server)
        with ThreadPoolExecutor(2) as threads:
            asked = threads.submit(complete, server.url, "runs", max_tokens=15_000)
            wait_until_running(server, 1)
            with suppress(httpx.TransportError):
                assert complete(server.url, "fails", seed=13)
            *_, error = asked.result()
        assert error["error"]["message"] == (
            "The engine has stopped after an internal error; the server must be restarted."
        )
        assert server.process.wait(STOP_SECONDS) == 1
    assert not any(map(is_running, left))
    errors = [line for line in server.log() if line["level"] == "ERROR"]
    assert [line["message"] for line in errors] == [
        "The engine has stopped",
        "The engine has stopped (RuntimeError: the device is gone), so the server ends",
    ]
    assert "changed_launch" in errors[0]["exception"]  # the traceback


def test_sigterm_to_all_processes_lets_a_stream_finish(small_model: Path, tmp_path: Path) -> None:
    """A service manager sends the signal to every process of a service."""
    with serve_process(str(small_model), tmp_path / "log", *FLAGS) as server:
        left = front_ends(server)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(complete, server.url, "drains", max_tokens=3000)
            wait_until_running(server, 1)
            for pid in (*left, server.process.pid):
                os.kill(pid, signal.SIGTERM)
            *_, last = asked.result()
        assert last["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(STOP_SECONDS) == 0
    assert not any(map(is_running, left))
    (end,) = (line for line in server.log() if line["logger"] == "oaiserve.request")
    assert (end["outcome"], end["completion_tokens"]) == ("finished", 3000)
    assert "Shut down. Requests finished: 1, cut off: 0" in [line["message"] for line in server.log()]
    assert [line for line in server.log() if line["level"] != "INFO"] == []
