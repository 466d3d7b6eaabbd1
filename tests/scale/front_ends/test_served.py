"""A server with front ends answers as one without does, with one account, one set of limits and one end.

The engine, its threads and the front ends are real; the latter run in threads instead of processes.
"""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.adapters import AdapterTable
from oaiserve.facts.continuation import IDS_HEADER, StreamIds
from oaiserve.facts.prefix_keys import prompt_of
from oaiserve.facts.times import TEXT_PHASES
from oaiserve.files.adapters import BadAdapter
from oaiserve.scale.front_ends.supervisor import MOST_SILENT
from tests.answers import shown
from tests.e2e.raw_client import send_request
from tests.engine.doubles import TIMEOUT_SECONDS, ScriptedRunner, make_engine
from tests.routes.conftest import run_server
from tests.routes.doubles import FakeTelemetry
from tests.scale.front_ends.doubles import Served, SilentChild, ThreadChild, serving
from tests.waiting import wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as served:
        yield served
        served.check_nothing_is_left()


def meaning(answer: httpx.Response) -> Any:
    """Return what an answer says. Of a stream, which may come in other pieces: each choice's text, and the rest."""
    content = shown(answer.content).decode()
    if not content.startswith("data: "):
        return content
    lines = [line.removeprefix("data: ") for line in content.splitlines() if line]
    texts: Counter[int] = Counter()
    rest = [lines[-1]]
    said: dict[int, str] = {}
    for line in lines[:-1]:
        event = json.loads(line)
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            said[choice["index"]] = said.get(choice["index"], "") + text + (choice["finish_reason"] or "")
            texts[choice["index"]] += len((choice.get("logprobs") or {}).get("tokens", ()))
        rest += [str(event.get("usage")), str(sorted(event))]
    return said, texts, set(rest)


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Hello", "max_tokens": 20}),
    (COMPLETIONS, {"prompt": ["a", "bc"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 3, "stream": True}),
    (COMPLETIONS, {"prompt": [[1, 2, 3]], "echo": True, "max_tokens": 2, "logprobs": 1}),
    (COMPLETIONS, {"prompt": "stop", "stop": "f", "max_tokens": 30, "stream": True}),
    (COMPLETIONS, {"prompt": "x" * 5000}),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"99999": 1}}),
    (COMPLETIONS, {"prompt": "x", "bad_words": ["  "]}),
    (CHAT, {"messages": HELLO, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 1}),
    (CHAT, {"messages": HELLO, "max_tokens": 4, "structured_outputs": {"regex": "("}}),
    (CHAT, {"messages": HELLO, "model": "other"}),
    ("/tokenize", {"prompt": "Hello", "return_token_strs": True}),
    ("/detokenize", {"tokens": [72, 101]}),
]


def test_answers_are_those_of_a_server_without_front_ends(served: Served) -> None:
    app = create_app(Config("demo"), make_engine(), FakeTelemetry())
    with run_server(app) as url, httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as alone, served.client() as ours:
        for path, body in REQUESTS:
            expected, got = alone.post(path, json=body), ours.post(path, json=body)
            assert got.status_code == expected.status_code, got.text
            assert meaning(got) == meaning(expected), body
            assert got.headers.keys() == expected.headers.keys()


def test_a_large_body_is_parsed_and_tokenized_in_turns(served: Served) -> None:
    with served.client() as client:
        text = "abc " * 17_000
        answer = client.post("/tokenize", json={"prompt": text})
        assert answer.json()["count"] == len(answer.json()["tokens"])
        assert client.post(COMPLETIONS, json={"prompt": text}).json()["error"]["code"] == "context_length_exceeded"
    served.check_nothing_is_left()


def test_the_header_and_the_account_have_the_same_phases_which_add_up(served: Served) -> None:
    with served.clients(4) as clients:
        for number, client in enumerate(clients):
            request_id = f"tiles-{number}"
            body = {"prompt": "Hello", "max_tokens": 9, "stream": bool(number % 2)}
            answer = client.post(COMPLETIONS, json=body, headers={"x-request-id": request_id})
            account = served.account(request_id)
            phases = {phase["name"]: phase["duration_ns"] for phase in account["phases"]}
            assert tuple(phases) == TEXT_PHASES
            assert sum(phases.values()) == account["duration_ns"]
            assert all(duration_ns >= 0 for duration_ns in phases.values())
            shown = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
            over = TEXT_PHASES[: len(shown)]  # a stream may have been decoded when its header is sent
            assert over[-1] in (("prefill", "decode") if number % 2 else ("decode",))
            assert shown == {name: f"{phases[name] / 1e6:.3f}" for name in over}
            for other in clients:  # any front end shows it
                assert other.get(f"/debug/requests/{request_id}").json()["duration_ns"] == account["duration_ns"]


def test_a_grammar_is_compiled_once_and_is_part_of_the_account(served: Served) -> None:
    with served.client() as client:
        for request_id, cache in (("grammar-1", "miss"), ("grammar-2", "hit")):
            body = {"messages": HELLO, "max_tokens": 4, "structured_outputs": {"regex": "abcd"}}
            answer = client.post(CHAT, json=body, headers={"x-request-id": request_id})
            assert answer.status_code == 200, answer.text
            account = served.account(request_id)
            assert account["grammar"]["cache"] == cache
            phases = {phase["name"]: phase["duration_ns"] for phase in account["phases"]}
            assert 0 < account["grammar"]["compile_ns"] <= phases["tokenize"]
            assert sum(phases.values()) == account["duration_ns"]


def metrics(client: httpx.Client) -> Counter[str]:
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] += int(sample.value)
    return found


def test_metrics_are_those_of_all_front_ends(served: Served) -> None:
    with served.clients(4) as clients:
        before = metrics(clients[0])
        for number, client in enumerate(clients):
            client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 3}, headers={"x-request-id": f"m-{number}"})
            served.account(f"m-{number}")
        for client in clients:
            now = metrics(client)
            assert now["oaiserve_requests_total"] - before["oaiserve_requests_total"] == 4
            assert now["oaiserve_generation_tokens_total"] - before["oaiserve_generation_tokens_total"] == 12
            assert now["oaiserve_connections"] == served.connections.num_open >= 4


def test_one_report_is_of_the_prompts_of_all_front_ends() -> None:
    body = {"prompt": "Call me Ishmael. " * 20, "max_tokens": 2}
    with serving(kv_blocks=256) as served, served.clients(2) as (one, other):
        prompts = served.engine._loop.requests.computed_prompts
        assert one.post(COMPLETIONS, json=body).status_code == 200
        assert not prompts
        report = one.get("/debug/report").json()
        assert (report["number"], report["keys"]) == (0, "")
        wait_until(lambda: other.post(COMPLETIONS, json=body).status_code == 200 and len(prompts) > 0)
        assert [key for key, _ in prompts[0]] == prompt_of(body).keys
        assert other.get("/debug/report").json()["incarnation"] == report["incarnation"]
        one_more = served.children()[0]
        one_more.kill()
        wait_until(lambda: one_more not in served.children())
        served.wait_until_up(2)
        prompts.clear()
        with served.client() as client:
            assert client.post(COMPLETIONS, json=body).status_code == 200
        assert prompts, "a front end that was started again knows that reports are asked for"


def test_connections_are_shared_out_evenly(served: Served) -> None:
    wait_until(lambda: served.connections.num_open == 0)
    with served.clients(10):
        wait_until(lambda: [running.front_end.num_connections for running in served.front_ends.running] == [5, 5])
    wait_until(lambda: served.connections.num_open == 0)


def test_a_stored_response_is_there_at_every_front_end(served: Served) -> None:
    with served.clients(2) as (one, other):
        first = one.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 16}).json()
        assert other.get(f"/v1/responses/{first['id']}").json() == first
        again = {"input": "More", "previous_response_id": first["id"], "max_output_tokens": 16}
        assert other.post("/v1/responses", json=again).json()["previous_response_id"] == first["id"]
        assert other.delete(f"/v1/responses/{first['id']}").json()["deleted"]
        begun = one.post("/v1/conversations", json={}).json()["id"]
        turn = {"input": "Hello", "max_output_tokens": 16, "conversation": begun}
        assert [client.post("/v1/responses", json=turn).status_code for client in (one, other)] == [200, 200]
        assert len(one.get(f"/v1/conversations/{begun}/items").json()["data"]) == 4
        assert one.get(f"/v1/responses/{first['id']}").status_code == 404


def test_the_live_page_follows_all_front_ends(served: Served) -> None:
    with served.clients(2) as (one, other):
        one.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 3}, headers={"x-request-id": "live"})
        served.account("live")
        with other.stream("GET", "/dashboard/feed") as feed:
            data = next(line for line in feed.iter_lines() if line.startswith("data: "))
        assert "live" in [request["request_id"] for request in json.loads(data.removeprefix("data: "))["requests"]]


# -- limits ------------------------------------------------------------------------------------------------------------


def test_the_queue_is_one_for_all_front_ends() -> None:
    with serving(ScriptedRunner(gated=True), max_running=1, max_waiting=2) as served:
        waiting = []
        for number in range(3):  # at front ends that take turns
            waiting.append(send_request(served.url, request_id=f"waits-{number}", prompt="Hi", max_tokens=5))
            wait_until(lambda number=number: served.runner.steps and served.engine.num_waiting >= number)  # type: ignore[misc]
        with served.clients(2) as clients:
            for client in clients:
                body = {"prompt": "Hi", "stream": True}
                refused = client.post(COMPLETIONS, json=body, headers={"x-request-id": "no"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
                assert "retry-after" in refused.headers
        served.runner.permit(1000)
        for sock in waiting:
            with sock, sock.makefile("rb") as answer:
                assert b" 200 " in answer.readline()
                answer.read()
        for number in range(3):
            assert served.account(f"waits-{number}")["outcome"] == "finished"
        refusals = served.telemetry.recent.list(id_prefix="no")
        assert [account["outcome"] for account in refusals] == ["rejected", "rejected"]
        assert all([phase["name"] for phase in account["phases"]] == ["receive"] for account in refusals)
        served.check_nothing_is_left()


def test_connections_that_are_too_many_are_refused() -> None:
    with serving(most_connections=2) as served, served.clients(2) as (one, _), served.client() as third:
        refused = third.get("/version")
        assert refused.status_code == 503
        assert "too many open connections" in refused.text
        one.close()
        wait_until(lambda: served.connections.num_open == 1)
        assert third.get("/version").status_code == 200


def test_an_adapter_that_is_loaded_is_there_at_every_front_end(tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    (tmp_path / "broken").mkdir()
    loaded: list[str] = []

    def add(number: int, name: str, path: Path) -> None:
        if path.name == "broken":
            raise BadAdapter(f"'{path}': it is broken")
        loaded.append(name)

    def names(client: httpx.Client) -> list[str]:
        return [model["id"] for model in client.get("/v1/models").json()["data"]]

    with (
        serving(adapters=AdapterTable(add, lambda number: None), lora_dir=tmp_path) as served,
        served.clients(2) as (one, other),
    ):
        refused = one.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "broken"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
        assert one.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "sql"}).status_code == 200
        assert (loaded, names(one)) == (["a"], ["demo", "a"])
        wait_until(lambda: names(other) == ["demo", "a"])
        again = other.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "sql"})
        assert "is loaded already" in again.json()["error"]["message"]
        assert other.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 200
        wait_until(lambda: names(one) == ["demo"])
        assert one.get("/v1/models").json() == other.get("/v1/models").json()


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_front_end_that_hangs_is_killed_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with serving(number=1, first=SilentChild, most_silent=10) as served:
        wait_until(lambda: any(type(child) is ThreadChild for child in served.children()))
        served.supervisor._most_silent = MOST_SILENT  # on a busy machine the new one may be silent for as long
        served.wait_until_up(1)
        with served.client() as client:
            assert client.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 3}).status_code == 200
    assert "A front end has not been heard of for a while, so it is killed" in caplog.messages


def test_the_account_of_a_request_whose_front_end_is_lost_says_what_it_was() -> None:
    server, headers = {"api_key": ("key",)}, {"authorization": "Bearer key", "x-request-id": "lost"}
    with serving(ScriptedRunner(gated=True), number=1, server=server) as served, served.client() as client:
        (running,) = served.front_ends.running
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.post, COMPLETIONS, json={"prompt": "Hi", "max_tokens": 50}, headers=headers)
            wait_until(lambda: bool(running.front_end.unrecorded))
            running.child.process.kill()
            served.runner.permit(1000)
            account = served.account("lost")
            assert asked.result(TIMEOUT_SECONDS).status_code == 500
        assert [account[name] for name in ("outcome", "operation", "model")] == ["failed", "text_completion", "demo"]
        assert account["client"] is not None


def test_a_request_of_a_gateway_has_its_account() -> None:
    headers = {IDS_HEADER: StreamIds("0" * 32, 1, 2).as_text, "x-request-id": "passed-on"}
    with serving(number=1) as served, served.client() as client:
        assert client.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 3}, headers=headers).status_code == 200
        assert served.account("passed-on")["steps"]["number"] >= 3
        assert not served.front_ends.running[0].front_end.unrecorded


def test_a_client_that_leaves_is_noticed() -> None:
    with serving(ScriptedRunner(gated=True)) as served:
        sock = send_request(served.url, request_id="leaves", prompt="Hi", max_tokens=50, stream=True)
        wait_until(lambda: served.runner.steps)
        sock.close()
        wait_until(lambda: served.connections.num_open == 0)
        served.runner.permit(1000)
        assert served.account("leaves")["outcome"] == "cancelled"
        served.check_nothing_is_left()
