"""A stream whose replica is killed, or hangs, goes on at another one. The client gets the same bytes."""

import json
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oaiserve.config import EngineOptions
from oaiserve.engine.request import TextPrompt
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.errors import Unavailable
from oaiserve.plugins.gateway.options import ContinueStreams
from oaiserve.plugins.gateway.relay import SIGN_OF_LIFE
from oaiserve.plugins.gateway.watch import Watch
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.routes.answer.sse import DONE
from oaiserve.wire.continuation import Piece
from tests.answers import by_choice, shown
from tests.engine.doubles import EOS, TOKENIZER, ScriptedRunner, make_engine, request
from tests.engine.executors.native.small_models import config, make_model
from tests.engine.remembered import save
from tests.missing_plugins import is_served
from tests.plugins.gateway.doubles import BEHIND_A_GATEWAY, OPTIONS, SIGNATURE, Fleet, ToldEngine, fleet, quick
from tests.world.serving import Place

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
STORE = "oaiserve.plugins.responses.store.ResponseDatabase"
ASKED = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
OF_RESPONSES = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}]
OF_MESSAGES = [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]
ALL_USAGE = {"include_usage": True, "continuous_usage_stats": True}
CALLS = ['{"name": "f", "arguments": {"a": "ü"}}', '{"name": "f", "arguments": {}}']
WITH_CALLS = "Now: é" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in CALLS)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (COMPLETIONS, {"prompt": "Hello", "max_tokens": 20}),
    "choices of prompts": (
        COMPLETIONS,
        {"prompt": ["Hi", "Hello"], "n": 2, "max_tokens": 12, "logprobs": 2, "echo": True},
    ),
    "chunks": (COMPLETIONS, {"prompt": "Hello", "max_tokens": 20, "stream_interval": 3, "stop": ["pq"]}),
    "ids": (COMPLETIONS, {"prompt": "Hello", "max_tokens": 14, "return_token_ids": True, "stream_options": ALL_USAGE}),
    "chat": (
        CHAT,
        {"messages": ASKED, "max_tokens": 15, "logprobs": True, "top_logprobs": 1, "stream_options": ALL_USAGE},
    ),
    "calls": (CHAT, {"messages": ASKED, "tools": TOOLS}),
    "response": (RESPONSES, {"input": "Hi", "max_output_tokens": 16}),
    "response with calls": (RESPONSES, {"input": "Hi", "tools": OF_RESPONSES}),
    "message": (MESSAGES, {"model": "m", "messages": ASKED, "max_tokens": 16}),
    "message with calls": (MESSAGES, {"model": "m", "messages": ASKED, "max_tokens": 900, "tools": OF_MESSAGES}),
}
CASES = {name: case for name, case in CASES.items() if is_served(case[0])}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model(config("llama", vocab_size=400, max_position_embeddings=1024))
    return save(model, tmp_path_factory.mktemp("model"), 400)


@pytest.fixture(autouse=True)
def each_step_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that gather while a reader is busy come in one chunk, so the chunks of two streams would differ. What was
    sent is taken up in parts."""
    monkeypatch.setattr("oaiserve.engine.event_streams.MAX_CHUNK_TOKENS", 0)
    monkeypatch.setattr("oaiserve.engine.requests.continuation.MOST_TAKEN_UP", 2)


SCRIPT = [*TOKENIZER.encode(TextPrompt(WITH_CALLS)), EOS]


def scripted(sequence: Sequence) -> int:
    return SCRIPT[min(sequence.num_generated, len(SCRIPT) - 1)]


def run_stream(
    running: Fleet, path: str, body: dict[str, Any], disturb: Callable[[str], Any] | None, after: int
) -> bytes:
    """Return the bytes of a stream whose replica is disturbed `after` steps after the first piece."""
    runners = [replica.runner for replica in running.replicas.values()]
    with running.threads() as threads:
        asked = running.http.build_request("POST", path, json=body | {"stream": True})
        asking = threads.submit(running.http.send, asked, stream=True)

        def step(times: int, until: Future[Any]) -> None:
            for _ in range(times):
                num_steps = sum(len(runner.steps) for runner in runners)
                for runner in runners:
                    runner.permit(1)
                running.wait_for(
                    lambda before=num_steps: until.done() or sum(len(one.steps) for one in runners) > before
                )

        while not asking.done():
            step(1, asking)
            running.settle(0.1)  # Steps while the head of the answer is late would soon end it.
        answer = asking.result()
        assert answer.status_code == 200, answer.read()
        reading = threads.submit(answer.read)
        step(after, reading)
        with nullcontext() if disturb is None else disturb(answer.headers[SIGNATURE]) or nullcontext():
            for runner in runners:
                runner.permit(1000)
            return reading.result()


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_stream_whose_replica_is_killed_has_the_bytes_of_an_undisturbed_one(
    place: Place, case: str, after: int
) -> None:
    path, body = CASES[case]
    server = replace(BEHIND_A_GATEWAY, tool_call_parser="hermes" if "calls" in case else "none")
    token_of = {"token_of": scripted} if "calls" in case else {}
    with fleet(place, 2, gated=True, server=server, **token_of) as running:
        running_alone = run_stream(running, path, body, None, 0)
    with fleet(place, 2, gated=True, server=server, **token_of) as running:
        found = run_stream(running, path, body, lambda name: running.replicas[name].server.kill(), after)
        assert running.metric("oaiserve_gateway_continued_total", result="alike") == 1
        assert running.metric("oaiserve_gateway_requests_total", ending="answered") == 1
    assert by_choice(shown(found)) == by_choice(shown(running_alone))
    assert b"\n: " not in found


ATTEMPTS = 5
LONG = "Hello " * 30
LONG_CASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9},
    RESPONSES: {"input": LONG, "max_output_tokens": 9},
    MESSAGES: {"model": "m", "messages": [{"role": "user", "content": LONG}], "max_tokens": 9},
}


@pytest.mark.plugin("responses")
@pytest.mark.parametrize("after", [2, 40])
def test_numbers_of_events_continue_after_signs_of_life(
    place: Place, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oaiserve.plugins.responses.shape.ResponsesShape.activity_seconds", 0.0)
    server = replace(BEHIND_A_GATEWAY, progress_after_seconds=1e-6)
    # A slow server may read the first token together with the progress, which it then leaves out.
    for _ in range(ATTEMPTS):
        with fleet(place, 2, gated=True, server=server) as running:
            disturb = lambda name: running.replicas[name].server.kill()  # noqa: E731
            found = run_stream(running, RESPONSES, LONG_CASES[RESPONSES], disturb, after)
        events = [json.loads(event.split(b"data: ")[1]) for event in found.split(b"\n\n") if b"data: {" in event]
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        if [event["type"] for event in events].count("response.in_progress") > 1:  # the begin, and a sign of life
            return
    pytest.fail(f"no sign of life was sent in {ATTEMPTS} attempts")


@pytest.mark.parametrize("after", [0, 2, 40])  # before the next part of the prompt, before the last, in the answer
@pytest.mark.parametrize("path", LONG_CASES)
def test_a_stream_that_has_begun_with_the_progress_of_its_prompt_goes_on_behind_that(
    place: Place, path: str, after: int
) -> None:
    server = replace(BEHIND_A_GATEWAY, progress_after_seconds=1e-6)

    def without_signs_of_life(content: bytes) -> list[bytes]:
        return [event for event in shown(content).split(b"\n\n") if not event.startswith((b": ", b"event: ping"))]

    def shows_progress(content: bytes) -> bool:
        return b"prompt tokens" in content or b"event: ping" in content

    # A slow server may read the first token together with the progress, which it then leaves out. A message that begins
    # then counts the tokens that are cached now.
    for _ in range(ATTEMPTS):
        with fleet(place, 2, gated=True, server=server) as running:
            running_alone = run_stream(running, path, LONG_CASES[path], None, 0)
        with fleet(place, 2, gated=True, server=server) as running:
            disturb = lambda name: running.replicas[name].server.kill()  # noqa: E731
            found = run_stream(running, path, LONG_CASES[path], disturb, after)
        assert b": tokens" not in found
        if shows_progress(found) and shows_progress(running_alone):
            assert without_signs_of_life(found) == without_signs_of_life(running_alone)
            return
    pytest.fail(f"no progress was shown in {ATTEMPTS} attempts")


def test_a_client_has_signs_of_life_until_its_stream_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oaiserve.plugins.gateway.relay.SIGN_OF_LIFE_SECONDS", 0.01)
    path, body = CASES["text"]
    with fleet(place, 2, gated=True) as running, place.threads() as threads:
        asked = running.http.build_request("POST", path, json=body | {"stream": True})
        asking = threads.submit(running.http.send, asked, stream=True)
        first, other = running.begun()
        first.runner.permit(3)
        answer = asking.result()
        found = b""
        first.server.kill()
        for part in answer.iter_raw():
            found += part
            if SIGN_OF_LIFE in found:
                other.runner.permit(1000)  # it has computed nothing before
    with fleet(place, 1, gated=True) as running:
        running_alone = run_stream(running, path, body, None, 0)
    assert found.count(SIGN_OF_LIFE) > 0
    assert shown(found.replace(SIGN_OF_LIFE, b"")) == shown(running_alone)


@pytest.mark.plugin("responses")
def test_a_stream_that_no_server_can_end_ends_with_an_error_after_a_few_tries(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(store: object, owner: str, stored: object) -> None:
        raise Unavailable("The disk is full.")

    monkeypatch.setattr(f"{STORE}.put", full)
    monkeypatch.setattr("oaiserve.plugins.gateway.relay.GO_ON_SECONDS", 0.5)
    monkeypatch.setattr("oaiserve.plugins.gateway.relay.PAUSE_SECONDS", 0.02)
    path, body = CASES["response"]
    with fleet(place, 2) as running:
        answer = running.http.post(path, json=body | {"stream": True}).content
        continued = running.metric("oaiserve_gateway_continued_total", result="alike")
        num_failures = [upstream.num_failures for upstream in running.watch.upstreams.values()]
    assert num_failures == [0, 0], "the stream is to blame"
    assert answer.count(b"response.output_text.delta") == 2 * 16
    assert b"event: error" in answer
    assert 0 < continued <= 5  # after 0, 40, 80, 160 and 320 ms


def test_a_stream_with_which_replicas_fail_is_tried_less_and_less_often(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []
    submit = ToldEngine.submit

    def submit_beginnings(engine: ToldEngine, request: Any, *given: Any, **named: Any) -> Any:
        if request.sent:
            tried.append(place.world.now)
            raise RuntimeError("This engine goes on with nothing.")
        return submit(engine, request, *given, **named)

    monkeypatch.setattr(ToldEngine, "submit", submit_beginnings)
    path, body = CASES["text"]
    with fleet(place, 3, gated=True) as running, place.threads() as threads:
        asked = running.http.build_request("POST", path, json=body | {"stream": True})
        asking = threads.submit(running.http.send, asked, stream=True)
        first, *_ = running.begun()
        first.runner.permit(3)
        answer = asking.result()
        first.server.kill()
        found = b"".join(answer.iter_raw())
    assert b"error" in found
    assert 60 > tried[-1] - tried[0] > 40
    assert len(tried) <= 2 * 20  # by both in each round


@pytest.mark.plugin("responses")
@pytest.mark.parametrize("stream", [False, True])
def test_a_store_that_fails_ends_the_answer_at_once_and_excludes_no_server(
    place: Place, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def full(store: object, owner: str, stored: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    excluded: list[str] = []
    monkeypatch.setattr(f"{STORE}._insert", full)
    monkeypatch.setattr(Watch, "exclude", lambda watch, name, why: excluded.append(name))
    path, body = CASES["response"]
    with fleet(place, 2) as running:
        answer = running.http.post(path, json=body | {"stream": stream})
        assert running.metric("oaiserve_gateway_continued_total", result="alike") == 0
        assert all(upstream.num_failures == 0 for upstream in running.watch.upstreams.values())
        assert excluded == []
    last = json.loads(answer.content.removesuffix(DONE).split(b"data: ")[-1])
    error = last["response"]["error"] if stream else last["error"]
    assert "'store': false" in error["message"]
    assert answer.status_code == (200 if stream else 503)
    assert stream or answer.headers["retry-after"] == "5"


@pytest.mark.plugin("responses")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("ends_after", "in_conversation"), [("put", False), ("put", True), ("replace", True)])
def test_a_response_stored_by_a_server_that_then_ends_is_stored_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends_after: str, in_conversation: bool, stream: bool
) -> None:
    """The next server computes the same response, stores it again, and goes on from the conversation as it was."""
    from oaiserve.plugins.responses.store import ResponseDatabase, StoredResponse

    path, body = CASES["response"]
    ended: list[str] = []
    write = getattr(ResponseDatabase, ends_after)

    async def write_and_end(store: ResponseDatabase, owner: str, *stored: StoredResponse) -> Any:
        result = await write(store, owner, *stored)
        if not ended and stored[-1].id.startswith("conv_" if ends_after == "replace" else "resp_"):
            replica = next(one for one in running.replicas.values() if one.app.state.responses.store is store)
            ended.append(replica.name)
            replica.server.die()
        return result

    monkeypatch.setattr(ResponseDatabase, ends_after, write_and_end)
    with fleet(place, 2, of_plugins=(StoreOptions(response_store=tmp_path / "store.db"),)) as running:
        if in_conversation:
            items = [{"id": "msg_of_client", "role": "user", "content": "Before"}]
            name = running.http.post("/v1/conversations", json={"items": items}).json()["id"]
            body = body | {"conversation": name, "input": [{"id": "msg_1", "role": "user", "content": "Hello"}]}
        asked = {name: value for name, value in body.items() if name != "max_output_tokens"}
        num_tokens = running.http.post(f"{path}/input_tokens", json=asked).json()["input_tokens"]
        answer = running.http.post(path, json=body | {"stream": stream})
        found = json.loads(answer.content.removesuffix(DONE).split(b"data: ")[-1])
        response = found["response"] if stream else found
        assert (len(ended), response["status"]) == (1, "completed" if "max_output_tokens" not in body else "incomplete")
        [other] = [one for one in running.replicas.values() if one.name not in ended]
        assert running.watch.upstreams[other.name].num_failures == 0
        kept = running.http.get(f"{path}/{response['id']}").json()
        assert (kept["output"], kept["usage"]) == (response["output"], response["usage"])
        if in_conversation:
            listed = running.http.get(f"/v1/conversations/{name}/items?order=asc").json()["data"]
            assert [item["id"] for item in listed] == ["msg_of_client", "msg_1", response["output"][0]["id"]]
        assert other.app.state.responses.store.counts().number == 1 + in_conversation
        assert response["usage"]["input_tokens"] == num_tokens


@pytest.mark.parametrize("is_told", [False, True], ids=["no reports", "its watchdog"])
def test_a_request_without_a_head_moves_when_its_replica_hangs(place: Place, is_told: bool) -> None:
    with fleet(place, 2, gated=True, pace=quick(answer_seconds=0.3)) as running, place.threads() as threads:
        asked = threads.submit(running.ask)
        hung, other = running.begun()
        if is_told:
            hung.engine.hang_in("launch")
        with nullcontext() if is_told else hung.server.hanging():
            other.runner.permit(1000)
            answer = asked.result()
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "abcd")
        assert answer.headers[SIGNATURE] != hung.name


@pytest.mark.parametrize(("continues", "kinds", "is_whole"), [
    ("any", ("a", "b"), True), ("any", ("", ""), True), ("alike", ("a", "b"), False), ("alike", ("", ""), False),
    ("never", ("a", "a"), False),
])  # fmt: skip
def test_a_stream_goes_on_at_a_server_of_another_kind_only_where_it_may(
    place: Place, continues: ContinueStreams, kinds: tuple[str, str], is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oaiserve.plugins.gateway.relay.GO_ON_SECONDS", 1.0)
    path, body = CASES["text"]
    with fleet(place, 2, gated=True, continues=continues) as running:
        for replica, kind in zip(running.replicas.values(), kinds, strict=True):
            state = replica.app.state
            state.serving = replace(state.serving, kind=kind)
        found = run_stream(running, path, body, lambda name: running.replicas[name].server.kill(), 3)
        result = "unlike" if is_whole else "failed"
        assert running.metric("oaiserve_gateway_continued_total", result=result) == (continues != "never")
        ending = "answered" if is_whole else "cut_off"
        assert running.metric("oaiserve_gateway_requests_total", ending=ending) == 1
    assert found.count(b": the answer goes on at a server of another kind") == is_whole
    assert found.count(b"service_unavailable") == (not is_whole)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("continues", ["any", "alike"])
def test_a_server_of_the_same_kind_is_preferred(place: Place, continues: ContinueStreams, odd: int) -> None:
    path, body = CASES["text"]
    with fleet(place, 3, gated=True, continues=continues) as running:
        replicas = list(running.replicas.values())
        for replica in replicas:
            state = replica.app.state
            state.serving = replace(state.serving, kind="b" if replica is replicas[odd] else "a")
        others = [replica.name for replica in replicas if replica is not replicas[odd]]
        for upstream in running.watch.upstreams.values() if continues == "any" else ():
            is_odd = upstream.address.port == replicas[odd].server.port
            upstream.kind = b"b" if is_odd else b"a"
        killed = []

        def kill(name: str) -> None:
            killed.append(name)
            running.replicas[name].server.kill()

        found = run_stream(running, path, body, kill, 3)
    if killed[0] in others:
        assert b"another kind" not in found
        assert b"service_unavailable" not in found


def test_others_have_their_steps_while_a_long_answer_is_taken_up() -> None:
    runner = ScriptedRunner(gated=True)
    with make_engine(runner) as engine:
        engine.submit(request("neighbour", max_tokens=40), lambda events: None)
        runner.started.get()
        sent = tuple(Piece(0, [70 + number]) for number in range(12))
        engine.submit(replace(request("long", max_tokens=14), sent=sent), lambda events: None)
        runner.permit(100)
        engine.world.wait_for(lambda: any("long" in {row[0] for row in step} for step in runner.steps))
        first = next(number for number, step in enumerate(runner.steps) if "long" in {row[0] for row in step})
    assert first >= 5  # two tokens between two steps


IDS = {"x-oaiserve-stream": f"{'ab' * 16} 5 7"}


def test_only_the_peers_that_the_operator_names_choose_ids(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    given = IDS | {"x-oaiserve-route": "replica=a; reason=b"}
    for server, is_trusted in ((BEHIND_A_GATEWAY, True), (OPTIONS, False)):
        with fleet(place, 1, server=server) as running:
            with running.straight() as replica:
                answer = replica.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 1}, headers=given).json()
            assert [running.ask(body={"stream": True}).status_code for _ in range(2)] == [200, 200]
        assert (answer["id"] == f"cmpl-{'ab' * 16}", answer["created"] == 5) == (is_trusted, is_trusted)
    assert sum("--trusted-proxy" in record.getMessage() for record in caplog.records) == 1


def test_what_was_sent_must_be_the_begin_of_an_answer(place: Place) -> None:
    def asked(pieces: bytes, length: str = "") -> dict[str, Any]:
        body = json.dumps({"prompt": "Hi", "max_tokens": 3}).encode() + pieces
        headers = IDS | {"x-oaiserve-sent": f"{length or len(pieces)}", "content-type": "application/json"}
        answer = replica.post(COMPLETIONS, content=body, headers=headers)
        assert answer.status_code == 400
        return dict(answer.json()["error"])

    with fleet(place, 1) as running, running.straight() as replica:
        assert "no pieces" in asked(b"{}")["message"]
        for length in ("-1", "99999", "x", "0"):
            assert "no number of bytes" in asked(b"[]", length)["message"]
        assert "outside the model's vocabulary" in asked(b"[[0,[123456789]]]")["message"]
        assert "cannot be its begin" in asked(b"[[0,[70,71,72,73]]]")["message"]
        assert running.ask().status_code == 200


def test_a_server_counts_the_tokens_that_it_generated_itself(place: Place) -> None:
    body = json.dumps({"prompt": "Hi", "max_tokens": 5}).encode()
    pieces = b"[[0,[70]],[0,[71]]]"
    headers = IDS | {"x-oaiserve-sent": str(len(pieces)), "content-type": "application/json"}
    with fleet(place, 1) as running:
        (replica,) = running.replicas.values()
        answer = running.straight().post(COMPLETIONS, content=body + pieces, headers=headers)
        record = replica.telemetry.next_record()
    assert answer.json()["usage"]["completion_tokens"] == record.completion_tokens == 5
    assert (record.account.num_continued_tokens, record.generated_tokens, record.tokens_per_choice) == (2, 3, 3)


MANY = {"type": "array", "items": {"type": "integer"}, "minItems": 40}
SCHEMA = {"type": "object", "properties": {"a": MANY}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
REAL: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 1.0, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    "a schema": {"temperature": 1.0, "response_format": FORM},
    "choices": {"n": 3, "temperature": 0.8},
}


@pytest.mark.compiler
@pytest.mark.parametrize("case", REAL)
def test_a_real_model_goes_on_with_the_same_tokens(place: Place, case: str, small_model: Path) -> None:
    """Two servers with the native step, one of which is killed while it writes."""
    options = EngineOptions(device="cpu", dtype="float32", kv_blocks=256, cpu_threads=1, block_size=16, drafts="off")
    body = {"messages": ASKED, "seed": 5, "max_tokens": 60, "ignore_eos": True, **REAL[case]}
    found = []
    for kills in (False, True):
        with fleet(place, 0) as running:
            for _ in range(2):
                running.add(engine=ToldEngine.from_pretrained(small_model, options, runtime=place.world))
            running.wait_until_known()
            kill = (lambda name, of=running: of.replicas[name].server.kill()) if kills else None
            found.append(by_choice(shown(run_stream(running, CHAT, body, kill, 6))))
            assert running.metric("oaiserve_gateway_continued_total", result="alike") == kills
    assert found[0] == found[1]
    assert all(len(events) > 20 for choice, events in found[0].items() if choice != -1)
