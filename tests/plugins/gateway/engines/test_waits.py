"""Why a request waited for its first byte: for whom, by what the engine says, and by what the gateway has learnt."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oaiserve.facts.record import FURTHER_CLIENTS
from oaiserve.facts.times import PASSED_PHASES
from oaiserve.plugins.gateway.engines.presence import MOST_NAMED, Line, Presence, Presences
from oaiserve.plugins.gateway.engines.reported import Reported, Sample, sample_of
from oaiserve.plugins.gateway.engines.times import PassedTimes
from tests.plugins.gateway.engines.doubles import (
    CHAT,
    DONE,
    LLAMA_CPP,
    OLLAMA,
    VLLM,
    Front,
    RawEngine,
    before,
    event,
    piece,
    stream,
    whole,
)
from tests.world.serving import Place

SECOND = 10**9
USAGE = event({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 2}})
KEYS = {"batchjob": "key-of-batchjob", "anna": "key-of-anna", "bert": "key-of-bert"}


class OneByOne:
    """Reads one prompt after the other, each for a second."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def __call__(self) -> None:
        async with self._lock:
            await asyncio.sleep(1)


@pytest.fixture
def front(place: Place, tmp_path: Path) -> Iterator[Front]:
    """A gateway with three clients in front of an engine that reads one prompt at a time."""
    file = tmp_path / "keys"
    file.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    engine = RawEngine(place)
    engine.answers[CHAT] = stream(OneByOne(), piece("Hi"), USAGE, DONE)
    with before(place, engine, api_key_file=(file,)) as running:
        yield running


def ask(front: Front, client: str, request_id: str) -> Any:
    headers = {"authorization": f"Bearer {KEYS[client]}", "x-request-id": request_id}
    return front.chat(body={"stream": True}, headers=headers)


def account(front: Front, request_id: str) -> dict[str, Any]:
    front.http.headers["authorization"] = f"Bearer {KEYS['anna']}"
    found = front.account(request_id)
    del front.http.headers["authorization"]
    return found


def wait_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the phase of the wait, whose causes add up to it exactly."""
    phase: dict[str, Any] = next(phase for phase in found["phases"] if phase["name"] == "first_byte")
    assert sum(phase["causes_ns"].values()) == phase["duration_ns"]
    return phase


def sentence_of(found: dict[str, Any]) -> str:
    return next(text for text in found["explanation"] if text.startswith("first byte took"))


def test_a_hog_is_found_by_name_and_no_client_learns_it(front: Front) -> None:
    for number in range(6):
        ask(front, "bert", f"alone-{number}")
    with front.place.threads() as threads:
        hogs = [threads.submit(ask, front, "batchjob", f"hog-{number}") for number in range(4)]
        front.settle(0.1)
        got = ask(front, "anna", "short")
        for hog in hogs:
            assert hog.result().status_code == 200
    found = account(front, "short")
    phase = wait_of(found)
    assert phase["duration_ns"] == pytest.approx(4.9 * SECOND, rel=0.01)
    assert phase["causes_ns"]["alone"] == pytest.approx(SECOND, rel=0.02)
    assert phase["causes_ns"]["neighbour_prompts"] == pytest.approx(3.9 * SECOND, rel=0.02)
    assert [(one["whose"], one["client"]) for one in phase["others"]] == [("other_client", "batchjob")]
    assert "s were behind 4 prompts of batchjob" in sentence_of(found)
    assert "alone it would have taken about 1 s, as earlier requests did" in sentence_of(found)
    assert "batchjob" not in got.text + str(got.headers)
    headers = {"authorization": f"Bearer {KEYS['anna']}"}
    rows = {row["client"]: row for row in front.http.get("/debug/clients", headers=headers).json()["clients"]}
    added_ns = sum(phase["causes_ns"].get(cause, 0) for cause in ("neighbour_prompts", "neighbour_decodes"))
    assert rows["batchjob"]["delayed_ns"] == rows["anna"]["waited_ns"] == added_ns


def test_requests_of_the_same_client_are_no_others(front: Front) -> None:
    for number in range(6):
        ask(front, "anna", f"alone-{number}")
    with front.place.threads() as threads:
        first = threads.submit(ask, front, "anna", "first")
        front.settle(0.1)
        ask(front, "anna", "second")
        first.result()
    found = account(front, "second")
    assert "behind 1 prompt of the same client" in sentence_of(found)
    assert [one["whose"] for one in wait_of(found)["others"]] == ["same_client"]


def test_what_a_request_takes_alone_is_not_known_at_first(front: Front) -> None:
    ask(front, "anna", "first")
    found = account(front, "first")
    assert wait_of(found)["causes_ns"].keys() == {"not_known_yet"}
    assert "is not known yet" in sentence_of(found)


def test_metrics_have_causes_and_open_requests_by_client(front: Front) -> None:
    for number in range(6):
        ask(front, "bert", f"alone-{number}")
    headers = {"authorization": f"Bearer {KEYS['anna']}"}
    with front.place.threads() as threads:
        asking = [threads.submit(ask, front, "batchjob", f"hog-{number}") for number in range(2)]
        front.settle(0.5)
        text = front.http.get("/metrics", headers=headers).text
        assert 'oaiserve_engine_open_requests{client="batchjob",engine="1"} 2.0' in text
        assert "batchjob" not in front.http.get("/metrics").text
        assert [one.result().status_code for one in asking] == [200, 200]
    front.settle(0.2)
    text = front.http.get("/metrics", headers=headers).text
    assert 'oaiserve_phase_cause_seconds_total{cause="alone",phase="first_byte"}' in text


def test_llama_cpps_own_times_divide_the_wait(place: Place) -> None:
    engine = RawEngine(place, dict(LLAMA_CPP))
    timings = {"prompt_n": 60, "cache_n": 40, "prompt_ms": 400.0, "predicted_n": 2, "predicted_ms": 50.0}
    last = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": timings})
    engine.answers[CHAT] = stream(1.0, piece("Hi"), last, DONE)
    with before(place, engine) as front:
        front.chat(body={"stream": True}, headers={"x-request-id": "told"})
        found = front.account("told")
    assert (found["prompt_tokens"], found["cached_tokens"], found["completion_tokens"]) == (100, 40, 2)
    causes_ns = wait_of(found)["causes_ns"]
    assert causes_ns["alone"] == 400_000_000
    assert causes_ns["inside_engine"] == pytest.approx(600_000_000, rel=0.02)
    assert "the engine says that it computed this request for 400 ms of it" in sentence_of(found)
    assert sentence_of(found).endswith("ms is not known from outside.")


def test_vllms_own_times_divide_the_wait(place: Place) -> None:
    engine = RawEngine(place, dict(VLLM))
    metrics = {"time_to_first_token_ms": 400.0, "generation_time_ms": 50.0, "queue_time_ms": 500.0, "mean_itl_ms": 50.0}
    usage = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 40}}
    engine.answers[CHAT] = stream(1.0, piece("Hi"), event({"choices": [], "usage": usage, "metrics": metrics}), DONE)
    with before(place, engine) as front:
        front.chat(body={"stream": True}, headers={"x-request-id": "told"})
        found = front.account("told")
    assert wait_of(found)["causes_ns"]["alone"] == 400_000_000
    assert "the engine says that it computed this request for 400 ms of it" in sentence_of(found)
    assert "the engine says that it was in its queue for 500 ms" in sentence_of(found)


def test_ollamas_load_of_a_model_is_a_cause(place: Place) -> None:
    engine = RawEngine(place, dict(OLLAMA))
    times = {"load_duration": 2 * SECOND, "prompt_eval_duration": SECOND, "eval_duration": SECOND}
    answer = {"message": {"content": "Hi"}, "done": True, "done_reason": "stop", **times}
    engine.answers["/api/chat"] = [4.0, *whole({**answer, "prompt_eval_count": 9, "eval_count": 2})]
    with before(place, engine) as front:
        front.http.post("/api/chat", json={"model": "m"}, headers={"x-request-id": "loaded"})
        found = front.account("loaded")
    causes_ns = wait_of(found)["causes_ns"]
    assert (causes_ns["model_load"], causes_ns["alone"]) == (2 * SECOND, 2 * SECOND)
    assert "for 2 s its model was being loaded" in sentence_of(found)
    assert [phase["name"] for phase in found["phases"]] == [*PASSED_PHASES]


def test_what_the_engine_reports_is_said_and_shown(place: Place) -> None:
    engine = RawEngine(place, dict(VLLM))

    def metrics(waiting: int, preemptions: int) -> list[object]:
        lines = [
            f'vllm:num_requests_waiting{{engine="0",model_name="a}} 7"}} {waiting}.0',
            "vllm:num_requests_running 2.0",
        ]
        lines += [f'vllm:num_preemptions_total{{engine="{part}"}} {preemptions}.0' for part in "01"]
        return whole("\n".join(["# TYPE x gauge", *lines, "vllm:num_requests_waiting_by_reason 9.0", ""]).encode())

    async def become_busy() -> None:
        engine.answers["/metrics"] = metrics(4, 3)

    engine.answers["/metrics"] = metrics(0, 1)
    engine.answers[CHAT] = stream(1.5, become_busy, 2.0, piece("Hi"), DONE)
    with before(place, engine) as front:
        front.chat(body={"stream": True}, headers={"x-request-id": "busy"})
        said = sentence_of(front.account("busy"))
        assert front.metric("oaiserve_engine_reported_requests", 'state="waiting"', 'engine="1"') == 4
        assert front.metric("oaiserve_engine_reported_requests", 'state="running"') == 2
        assert front.metric("oaiserve_engine_reported_preemptions_total") == 6
        assert front.metric("oaiserve_requests_waiting") == 4
    assert "the engine reported 4 waiting; the engine preempted 4 meanwhile" in said


def test_only_samples_of_the_wait_are_said() -> None:
    reported = Reported()
    for second in range(10):
        reported.add(Sample(second * SECOND, waiting=second))
    assert [*reported.said_between(2 * SECOND, 4 * SECOND)] == ["the engine reported 4 waiting"]
    assert [*reported.said_between(0, 0)] == []
    reported.forget()
    assert reported.last is None


def test_numbers_that_are_none_are_left_out() -> None:
    text = b"sglang:num_queue_reqs NaN\nsglang:num_queue_reqs 3.0\nsglang:cached_tokens_total -1\n"
    assert sample_of(text, 5) == Sample(5, waiting=3)


@pytest.mark.parametrize(
    ("text", "sample"),
    [
        (
            b'sglang:num_queue_reqs{priority="",tp_rank="0"} 5.0\n'
            b'sglang:num_queue_reqs{priority="1",tp_rank="0"} 2.0\n'
            b'sglang:num_queue_reqs{priority="7",tp_rank="0"} 3.0\n'
            b'sglang:num_retracted_requests_total{tp_rank="0"} 4.0\n'
            b'sglang:prompt_tokens_total{is_streaming="true"} 90.0\n'
            b'sglang:prompt_tokens_total{is_streaming="false"} 10.0\n'
            b'sglang:cached_tokens_total{cache_source="device"} 20.0\n'
            b'sglang:cached_tokens_total{cache_source="host"} 5.0\n',
            Sample(1, waiting=5, preemptions=4, queried_tokens=100, hit_tokens=25),
        ),
        (
            b"llamacpp:prompt_tokens_total 70\nllamacpp:prompt_tokens_cached_total 30\n",
            Sample(1, queried_tokens=100, hit_tokens=30),
        ),
        (b"llamacpp:prompt_tokens_total 70\n", Sample(1)),  # An older one doesn't say how many more were cached.
    ],
    ids=["sglang", "llama.cpp", "older llama.cpp"],
)
def test_parts_of_an_engines_numbers_are_added_up(text: bytes, sample: Sample) -> None:
    assert sample_of(text, 1) == sample


def test_a_line_is_known_after_some_points() -> None:
    line = Line()
    for tokens in (10, 20, 40, 80):
        line.add(tokens, 1000 + 5 * tokens)
        assert line.at(tokens) is None
    line.add(160, 1000 + 5 * 160)
    assert line.at(1000) == pytest.approx(6000, rel=0.001)


def test_a_line_through_prompts_of_one_length_is_their_mean() -> None:
    line = Line()
    for _ in range(9):
        line.add(100, 700)
    assert line.at(5) == pytest.approx(700, abs=1)
    assert line.at(500) == pytest.approx(700, abs=1)


def test_time_of_several_others_at_once_counts_once() -> None:
    presences = Presences()
    own = Presence("a", None, PassedTimes(sent=10, first_byte=110))
    presences.enter(own)
    for client, sent, first, last in (("b", 0, 60, 80), ("b", 5, 50, 90), ("c", 20, 70, 200), ("d", 200, 210, 220)):
        other = Presence(client, client, PassedTimes(sent=sent, first_byte=first, last_token=last))
        presences.enter(other)
        presences.leave(other, last)
    behind, covered = presences.behind(own)
    assert [(one.name, one.num_prompts, one.num_answers, one.prompts_ns, one.answers_ns) for one in behind] == [
        ("b", 2, 2, 90, 60),
        ("c", 0, 1, 0, 40),  # It came later, so only its answer may have delayed this one.
    ]
    assert covered == 100


def test_others_beyond_the_first_few_count_as_one_with_a_key_and_one_without() -> None:
    presences = Presences()
    own = Presence("a", None, PassedTimes(sent=0, first_byte=1000))
    presences.enter(own)
    names = [*(f"{number}" for number in range(MOST_NAMED + 2)), None]
    for place, name in enumerate(names):
        other = Presence(name or "10.0.0.1", name, PassedTimes(sent=0, first_byte=900 - place, last_token=900 - place))
        presences.enter(other)
        presences.leave(other, 1000)
    behind, _ = presences.behind(own)
    assert [one.name for one in behind] == [*names[:MOST_NAMED], FURTHER_CLIENTS, None]
    assert [one.num_prompts for one in behind[MOST_NAMED:]] == [2, 1]
