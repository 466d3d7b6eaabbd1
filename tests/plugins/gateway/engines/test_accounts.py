"""What the gateway knows of engines of other kinds, and of the time of requests to them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from oaiserve.facts.times import PASSED_PHASES
from oaiserve.plugins.gateway.engines.identity import Identity
from oaiserve.plugins.gateway.engines.times import PassedTimes
from oaiserve.telemetry import tracing
from tests.plugins.gateway.engines.doubles import (
    ASK,
    CHAT,
    DONE,
    LLAMA_CPP,
    OLLAMA,
    SGLANG,
    STREAM,
    VLLM,
    Part,
    RawEngine,
    before,
    piece,
    stream,
    whole,
)
from tests.world.serving import Place


@pytest.mark.parametrize(
    ("answers", "identity"),
    [
        (LLAMA_CPP, Identity("llama.cpp", "b7000-abc", ("m",), 4096, has_metrics=True)),
        (VLLM, Identity("vllm", "0.33.0", ("m",), 8192, has_metrics=True)),
        (SGLANG, Identity("sglang", "0.5.23", ("m",), 4096)),
        (OLLAMA, Identity("ollama", "0.40.12", ("m",), 4096)),
        (OLLAMA | {"/api/ps": whole({"models": []})}, Identity("ollama", "0.40.12", ("m",))),
        ({}, Identity()),
        ({"/v1/models": whole(b"<html>"), "/metrics": whole(b"\xff"), "/props": whole([1])}, Identity()),
        (
            {"/v1/models": whole({"data": [7, {"id": 1}, {"id": "x"}]}), "/version": whole({"version": 2})},
            Identity(models=("x",)),
        ),
    ],
    ids=["llama.cpp", "vllm", "sglang", "ollama", "ollama unloaded", "nothing", "nonsense", "half of it"],
)
def test_an_engine_is_found_out_by_asking(
    place: Place, answers: Mapping[str, Sequence[Part]], identity: Identity
) -> None:
    engine = RawEngine(place, dict(answers))
    with before(place, engine) as front:
        assert front.fleet.engines[0].identity == identity
        labels = [f'kind="{identity.kind}"', f'version="{identity.version}"', 'engine="1"']
        assert front.metric("oaiserve_engine_info", *labels) == 1
        assert front.metric("oaiserve_engine_up") == 1


def test_an_engine_is_shown_with_its_models_or_as_one_that_lists_none_yet() -> None:
    assert Identity().shown == "an engine of an unknown kind, which lists no models yet"
    assert Identity("llama.cpp", "b7", ("a", "b"), 4096).shown == "llama.cpp b7, a, b, 4,096 tokens of context"


def test_an_engine_that_starts_later_is_found_then(place: Place) -> None:
    engine = RawEngine(place, dict(LLAMA_CPP))
    engine.kill()
    with before(place, engine) as front:
        assert front.chat().status_code == 503
        assert not front.http.get("/ready").is_success
        engine.start()
        front.settle(3)
        assert front.http.get("/ready").is_success
        assert front.fleet.engines[0].identity.kind == "llama.cpp"


def test_an_engine_that_loads_its_model_is_not_ready(place: Place) -> None:
    loading = whole({"error": {"message": "Loading model"}}, b"503 Service Unavailable")
    answers = {"/health": loading, CHAT: loading, "/v1/models": LLAMA_CPP["/v1/models"]}
    engine = RawEngine(place, dict(answers))
    with before(place, engine) as front:
        assert front.http.get("/ready").status_code == 503
        assert front.metric("oaiserve_engine_up") == 0
        assert front.chat().json() == {"error": {"message": "Loading model"}}  # It may have loaded since the last look.
        engine.answers = {**LLAMA_CPP, "/health": whole({"status": "ok"})}
        front.settle(3)
        assert front.http.get("/ready").is_success
        assert front.fleet.engines[0].identity.version == "b7000-abc"


def test_all_links_lead_to_paths_of_the_gateway(place: Place) -> None:
    engine = RawEngine(place, dict(LLAMA_CPP))
    with before(place, engine) as front:
        links = front.http.get("/").json()["links"]
        assert links["page"] == "dashboard"
        statuses = {link: front.http.get(f"/{link}").status_code for link in links.values() if link != "v1"}
        assert statuses == dict.fromkeys(statuses, 200)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_url_may_end_as_that_of_a_client_does(place: Place, suffix: str) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = whole({"choices": []})
    with before(place, engine.url + suffix) as front:
        assert front.chat().status_code == 200
    engine.kill()


def test_a_url_may_have_a_path_of_its_own(place: Place) -> None:
    engine = RawEngine(place, {f"/llm{CHAT}": whole({"choices": []})})
    with before(place, f"{engine.url}/llm/v1") as front:
        assert front.chat().status_code == 200
    engine.kill()


def test_the_account_of_a_stream_has_all_phases_and_the_usage(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = stream(b": wait\n\n", 2.0, piece("Hel"), *[0.5, piece("lo")] * 2, DONE)
    engine.answers[CHAT] = [engine.answers[CHAT][0], 1.0, *engine.answers[CHAT][1:-1], *STREAM[-3:]]
    with before(place, engine) as front:
        front.chat(body={"stream": True, "max_tokens": 7}, headers={"x-request-id": "all"})
        account = front.account("all")
        listed = front.http.get("/debug/requests?form=row&slowest=first_byte").json()["requests"]
    assert [phase["name"] for phase in account["phases"]] == [*PASSED_PHASES]
    seconds = {phase["name"]: phase["duration_ns"] / 1e9 for phase in account["phases"]}
    assert seconds["first_byte"] == pytest.approx(3, abs=0.05)  # The comment is none of it.
    assert seconds["stream"] == pytest.approx(1, abs=0.05)
    assert account["time_to_first_token_ns"] == pytest.approx(3e9, rel=0.02)
    assert account["token_gaps"]["number"] == 2
    assert (account["prompt_tokens"], account["cached_tokens"], account["completion_tokens"]) == (9, 4, 2)
    assert (account["model"], account["stream"], account["params"]) == ("m", True, {"max_tokens": 7})
    assert account["routing"]["engine"] == 1
    assert [row["request_id"] for row in listed] == ["all"]


def test_an_answer_in_one_piece_has_its_usage_and_no_first_token(place: Place) -> None:
    engine = RawEngine(place)
    choice = {"index": 0, "message": {"content": "Hello"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    engine.answers[CHAT] = whole({"id": "chatcmpl-1", "choices": [choice], "usage": usage})
    with before(place, engine) as front:
        front.chat(headers={"x-request-id": "one"})
        account = front.account("one")
    assert (account["prompt_tokens"], account["completion_tokens"]) == (9, 2)
    assert (account["response_id"], account["finish_reasons"]) == ("chatcmpl-1", ["stop"])
    assert account["time_to_first_token_ns"] is None


def test_a_model_that_no_engine_lists_is_in_no_label(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = whole({"choices": []})
    with before(place, engine) as front:
        front.chat(body={"model": "made up"}, headers={"x-request-id": "odd"})
        account = front.account("odd")
        assert front.metric("oaiserve_requests_total", 'model="m"', 'engine="1"') == 1
        assert "made up" not in front.http.get("/metrics").text
    assert (account["model"], account["requested_model"]) == ("m", "made up")


def test_metrics_have_the_names_of_our_own_server_with_the_engine(place: Place) -> None:
    engines = RawEngine(place), RawEngine(place)
    for engine in engines:
        engine.answers[CHAT] = STREAM
    with before(place, *engines) as front:
        for _ in range(6):
            front.chat(body={"stream": True, "messages": [{"role": "user", "content": str(_)}]})
        numbers = [len(engine.questions()) for engine in engines]
        assert sum(numbers) == 6
        for number, asked in enumerate(numbers, start=1):
            label = f'engine="{number}"'
            assert front.metric("oaiserve_requests_total", label) == asked
            for name in ("request_phase_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"):
                assert (front.metric(f"oaiserve_{name}_count", label) > 0) == (asked > 0)
            assert front.metric("gen_ai_server_request_duration_seconds_count", label) == asked
        text = front.http.get("/metrics").text
    assert "oaiserve_kv_" not in text
    assert "vllm:" not in text


def test_an_open_request_is_listed_with_its_phase(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = stream(5.0, piece("Hello"), DONE)
    with before(place, engine) as front, front.place.threads() as threads:
        asking = threads.submit(front.chat, body={"stream": True}, headers={"x-request-id": "open"})
        front.settle(2)
        opened = front.http.get("/debug/requests").json()["open"]
        assert [(row["request_id"], row["phase"]) for row in opened] == [("open", "first_byte")]
        assert front.http.get("/debug/requests/open").json()["phase"] == "first_byte"
        assert asking.result().status_code == 200


def test_spans_have_the_phases_and_the_engine_continues_the_trace(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setattr(tracing, "exporter", lambda kind: exporter)
    engine = RawEngine(place)
    engine.answers[CHAT] = STREAM
    with before(place, engine) as front:
        front.chat(body={"stream": True}, headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
        front.settle(20)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {f"POST {CHAT}", "chat m", *PASSED_PHASES}
    server = spans[f"POST {CHAT}"].context
    assert engine.questions()[0].headers["traceparent"] == f"00-{'a' * 32}-{server.span_id:016x}-01"
    assert spans["chat m"].attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    assert spans["chat m"].attributes["oaiserve.routing.engine"] == 1


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat", "/api/generate", "/completion"])
def test_other_apis_have_accounts_too(place: Place, path: str) -> None:
    engine = RawEngine(place)
    answers = {
        "/v1/messages": whole(
            {"id": "msg_1", "usage": {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 2}}
        ),
        "/v1/responses": whole({"id": "resp_1", "usage": {"input_tokens": 9, "output_tokens": 2}}),
        "/api/chat": whole({"message": {"content": "x"}, "done": True, "prompt_eval_count": 9, "eval_count": 2}),
        "/api/generate": whole({"response": "x", "done": True, "prompt_eval_count": 9, "eval_count": 2}),
        "/completion": whole({"content": "x", "timings": {"prompt_n": 5, "cache_n": 4, "predicted_n": 2}}),
    }
    engine.answers |= answers
    with before(place, engine) as front:
        assert front.http.post(path, json=ASK, headers={"x-request-id": "other"}).status_code == 200
        account = front.account("other")
    assert (account["prompt_tokens"], account["completion_tokens"]) == (9, 2)


def test_pages_show_the_requests(place: Place) -> None:
    engine = RawEngine(place)
    engine.answers[CHAT] = STREAM
    with before(place, engine) as front:
        got = front.chat(body={"stream": True}, headers={"x-request-id": "shown"})
        assert got.headers["link"].startswith("<../../requests/shown>")
        for path in ("/requests", "/requests/shown", "/dashboard", "/clients", "/runs"):
            assert front.http.get(path).headers["content-type"].startswith("text/html")
        front.settle(0.2)
        assert front.http.get("/debug/clients").json()["clients"][0]["requests"] == 1
        assert front.http.get("/debug/runs").status_code == 200


@pytest.mark.parametrize("spaces", [(",", ":"), (", ", ": ")])
def test_events_that_are_alike_are_counted_as_if_each_were_read(place: Place, spaces: tuple[str, str]) -> None:
    def chunk(content: Any, **more: Any) -> bytes:
        choice = {"finish_reason": None, "index": 0, "delta": {"content": content}}
        return b"data: " + json.dumps({"choices": [choice], "id": "x", **more}, separators=spaces).encode() + b"\n\n"

    engine = RawEngine(place)
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": {"prompt_tokens": 7}}
    ending = b"data: " + json.dumps(last, separators=spaces).encode() + b"\n\n"
    texts = [chunk(None), 0.5, chunk("a"), 0.1, chunk('"usage":{"prompt_tokens":9}'), 0.1, chunk(""), 0.1, chunk("{}")]
    engine.answers[CHAT] = stream(*texts, 0.1, ending, DONE)
    with before(place, engine) as front:
        front.chat(body={"stream": True}, headers={"x-request-id": "alike"})
        account = front.account("alike")
    assert account["token_gaps"]["number"] == 2  # between "a", the text that looks like a usage, and "{}"
    assert account["time_to_first_token_ns"] == pytest.approx(5e8, rel=0.02)
    assert (account["prompt_tokens"], account["finish_reasons"]) == (7, ["length"])


def test_the_page_of_metrics_is_valid_in_both_formats(place: Place) -> None:
    engine = RawEngine(place, dict(VLLM))
    engine.answers[CHAT] = STREAM
    with before(place, engine) as front:
        front.chat(body={"stream": True})
        front.settle(0.2)
        classic = [*text_string_to_metric_families(front.http.get("/metrics").text)]
        wanted = {"accept": "application/openmetrics-text"}
        other = [*openmetrics.text_string_to_metric_families(front.http.get("/metrics", headers=wanted).text)]
    for families in (classic, other):
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        assert {"oaiserve_request_phase_seconds", "oaiserve_engine_info"} <= {*names} | {
            f"{name}_info" for name in names
        }


def test_time_of_a_failed_attempt_is_time_of_waiting() -> None:
    times = PassedTimes(received=0, submitted=10)
    times.begin_attempt(20)
    times.sent = 30
    times.begin_attempt(50)  # at another engine, which is not reached either
    times.responded = 90
    assert [(phase.name, phase.duration_ns) for phase in times.phases()] == [
        ("receive", 10),
        ("wait", 40),
        ("connect", 40),
    ]
