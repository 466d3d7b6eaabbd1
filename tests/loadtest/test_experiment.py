"""Experiments with a server that only has metrics, and with workers that send nothing."""

import threading
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Any

import httpx
import pytest

from loadtest.arrivals import Arrivals
from loadtest.client_health import ProcessHealth
from loadtest.errors import UsageError
from loadtest.experiment import HttpExperiment
from loadtest.http_target import HttpOptions
from loadtest.prompts import Workload
from loadtest.sample import Sample
from loadtest.workers import Job


class SilentWorkers:
    """Workers that keep the jobs and end every request at once, with `cached_tokens` of its prompt cached."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.gauges_read = threading.Event()  # set when the thread of the gauges has read /metrics
        self.cached_tokens = 0
        self.until: Callable[[], object] = lambda: None

    def run(
        self, job: Job, before_start: Callable[[], None], on_progress: Callable[[Any], None]
    ) -> tuple[list[Sample], list[ProcessHealth]]:
        self.jobs.append(job)
        before_start()
        now_ns = monotonic_ns()
        self.until()
        samples = [
            Sample(
                i, now_ns, sent_ns=now_ns, headers_ns=now_ns, event_ns=[now_ns + 9], end_ns=now_ns + 10,
                prompt_tokens=len(call.prompt), cached_tokens=self.cached_tokens, completion_tokens=1,
            )
            for i, call in enumerate(job.calls)
        ]  # fmt: skip
        return samples, [ProcessHealth()]


@pytest.fixture
def workers() -> SilentWorkers:
    return SilentWorkers()


@pytest.fixture
def client(workers: SilentWorkers) -> Iterator[httpx.Client]:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if threading.current_thread() is not threading.main_thread():
            workers.gauges_read.set()
        return httpx.Response(200, text="oaiserve_requests_running 3\n")

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://test") as client:
        yield client


def experiment(client: httpx.Client, workers: SilentWorkers, http: HttpOptions, **workload: Any) -> HttpExperiment:
    options = {"num_requests": 4, "input_len": "20"} | workload
    return HttpExperiment(client, Workload(**options), http, workers, {}, 0)  # type: ignore[arg-type]


QUIET = HttpOptions(scrape_seconds=0)


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.join.SETTLE_SECONDS", 0.0)  # the metrics of this server never include the requests


def test_no_run_repeats_a_prompt_of_an_earlier_run(client: httpx.Client, workers: SilentWorkers) -> None:
    tested = experiment(client, workers, QUIET)
    for users in (1, 2):
        tested.run_point(Arrivals(concurrency=users), 2, "x")
    prompts = [tuple(call.prompt) for job in workers.jobs for call in job.calls]
    assert len(prompts) == len(set(prompts)) == 16
    again = experiment(client, workers, QUIET)
    again.run_point(Arrivals(), 1, "x")
    assert [tuple(call.prompt) for call in workers.jobs[-1].calls] == prompts[:4]


@pytest.mark.parametrize(
    ("workload", "cached_tokens", "is_suspect"),
    [({}, 4, False), ({}, 10, True), ({"prompt": "x" * 20}, 10, False), ({"prefix_len": 15}, 10, False)],
)
def test_cached_random_prompts_make_a_run_suspect(
    client: httpx.Client, workers: SilentWorkers, workload: dict[str, Any], cached_tokens: int, is_suspect: bool
) -> None:
    workers.cached_tokens = cached_tokens
    (run,) = experiment(client, workers, QUIET, **workload).run_point(Arrivals(), 1, "x")["runs"]
    assert any("take another --seed" in reason for reason in run["client"]["reasons"]) == is_suspect
    assert (run["client"]["verdict"] == "valid") == (not is_suspect)


def test_a_closed_loop_that_ran_out_of_requests_is_suspect(client: httpx.Client, workers: SilentWorkers) -> None:
    (run,) = experiment(client, workers, QUIET).run_point(Arrivals(duration_seconds=60), 1, "x")["runs"]
    assert run["client"]["verdict"] == "suspect"
    assert "all 4 requests were sent before 60 s; raise --num-requests" in run["client"]["reasons"]


def test_gauges_are_read_during_a_run(client: httpx.Client, workers: SilentWorkers) -> None:
    read = workers.gauges_read
    workers.until = lambda: (read.clear(), read.wait(60))  # reads before the start do not count
    http = HttpOptions(scrape_seconds=0.001)
    (run,) = experiment(client, workers, http).run_point(Arrivals(), 1, "x")["runs"]
    gauges = run["server"]["gauges"]
    assert gauges["num_reads"] >= 1
    assert gauges["series"][0]["running"] == 3
    assert gauges["series"][0]["at"] > 0
    (run,) = experiment(client, SilentWorkers(), QUIET).run_point(Arrivals(), 1, "x")["runs"]
    assert "gauges" not in run["server"]


@pytest.mark.parametrize(("status", "advice"), [(401, "Give an --api-key"), (404, "Name one with --model")])
def test_the_message_gives_advice_if_the_server_lists_no_model(
    workers: SilentWorkers, status: int, advice: str
) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, json={}))
    with (
        httpx.Client(transport=transport, base_url="http://test") as client,
        pytest.raises(UsageError, match=f"answers {status} .*{advice}"),
    ):
        experiment(client, workers, QUIET)
