"""Batches of messages: Anthropic's client works with them, in the store and by the runner of OpenAI's batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types.messages import MessageBatch

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.plugins.batches import plugin, runner
from oaiserve.plugins.messages import plugin as messages_plugin
from tests.batching import begin, ended, later, line
from tests.plugins.batches.test_batches import waits_for
from tests.routes.asking import refused
from tests.routes.doubles import FakeEngine, FakeTelemetry
from tests.serving import Served
from tests.world.serving import Place, WorldServed

pytestmark = pytest.mark.plugin("messages")
PATH = "/v1/messages/batches"


@pytest.fixture
def sdk(served: Served) -> Iterator[Anthropic]:
    with served.anthropic() as sdk:
        yield sdk


def params(text: str = "Hi", **more: Any) -> dict[str, Any]:
    return {"model": "org/demo", "max_tokens": 5, "messages": [{"role": "user", "content": text}], **more}


def requests(number: int) -> list[Any]:
    return [{"custom_id": f"line-{place}", "params": params(f"Number {place}")} for place in range(number)]


def after_its_end(sdk: Anthropic, batch: MessageBatch) -> MessageBatch:
    ended_batch: MessageBatch = later(
        lambda: sdk.messages.batches.retrieve(batch.id), lambda now: now.processing_status == "ended"
    )
    return ended_batch


def counts_of(batch: MessageBatch) -> dict[str, int]:
    return {name: number for name, number in batch.request_counts.to_dict().items() if number}


def test_a_batch_is_answered_in_the_background_and_anthropics_client_reads_it(served: Served, sdk: Anthropic) -> None:
    begun = sdk.messages.batches.create(requests=requests(70))
    assert (begun.type, begun.ended_at, begun.results_url) == ("message_batch", None, None)
    assert (begun.expires_at - begun.created_at).total_seconds() == 24 * 3600
    batch = after_its_end(sdk, begun)
    assert (batch.id, counts_of(batch)) == (begun.id, {"succeeded": 70})
    results = list(sdk.messages.batches.results(batch.id))
    assert [one.custom_id for one in results] == [f"line-{place}" for place in range(70)]
    for one in results:
        assert one.result.type == "succeeded"
        assert one.result.message.content[0].to_dict()["text"] == "Hello world"
    assert all(served.engine.submitted.get_nowait().is_background for _ in range(70))


def test_the_url_of_the_results_is_absolute_unless_a_proxy_hides_the_address_that_the_client_uses(
    served: Served, sdk: Anthropic
) -> None:
    # Vercel's AI SDK fetches the URL as it is. Anthropic's own clients would resolve a path.
    batch = after_its_end(sdk, sdk.messages.batches.create(requests=requests(1)))
    path = f"{PATH}/{batch.id}/results"
    assert batch.results_url == f"{served.url}{path}"
    assert served.http.get(batch.results_url).status_code == 200
    newest = served.http.get(PATH).json()["data"][0]
    assert newest["results_url"] == batch.results_url
    for header in ("x-forwarded-for", "x-forwarded-proto", "forwarded", "via"):
        proxied = served.http.get(f"{PATH}/{batch.id}", headers={header: "any"})
        assert proxied.json()["results_url"] == path, header


def test_a_request_that_is_refused_has_its_error_and_the_others_go_on(sdk: Anthropic) -> None:
    wrong = {"custom_id": "wrong", "params": params(temperature=-3)}
    batch = after_its_end(sdk, sdk.messages.batches.create(requests=[*requests(1), wrong]))
    assert counts_of(batch) == {"succeeded": 1, "errored": 1}
    _, refusal = sdk.messages.batches.results(batch.id)
    assert refusal.result.type == "errored"
    assert refusal.result.error.error.type == "invalid_request_error"
    assert "temperature" in refusal.result.error.error.message


def test_a_result_says_how_its_request_was_adapted(sdk: Anthropic) -> None:
    silent = [{"role": "user", "content": "Hi"}, {"role": "assistant"}, {"role": "user", "content": "Hi"}]
    lenient = {"custom_id": "lenient", "params": params(messages=silent)}
    batch = after_its_end(sdk, sdk.messages.batches.create(requests=[*requests(1), lenient]))
    exact, adapted = (result.to_dict() for result in sdk.messages.batches.results(batch.id))
    assert exact.keys() == {"custom_id", "result"}
    assert adapted["headers"] == {"x-oaiserve-adapted": "messages[1].content: is missing, and read as empty"}


def test_a_request_may_have_line_ends_and_half_of_an_emoji(served: Served, sdk: Anthropic) -> None:
    body = json.dumps({"requests": [{"custom_id": "a\u2028b", "params": params("a\nb \ud83d")}]}, indent=2)
    answer = served.http.post(PATH, content=body, headers={"content-type": "application/json"})
    assert answer.headers["x-oaiserve-adapted"] == "the body: halves of surrogate pairs are read as U+FFFD"
    batch = after_its_end(sdk, anthropic.types.messages.MessageBatch.model_validate(answer.json()))
    (result,) = sdk.messages.batches.results(batch.id)
    assert (result.custom_id, result.result.type) == ("a\u2028b", "errored")
    # It has reached the tokenizer, whose vocabulary here lacks the character that replaces the half.
    assert "outside the model's vocabulary" in result.result.error.error.message  # type: ignore[union-attr]


def test_an_id_with_half_of_a_surrogate_pair_is_refused_because_it_could_not_come_back(served: Served) -> None:
    body = json.dumps({"requests": [{"custom_id": "a\ud83d", "params": params()}]})
    answer = served.http.post(PATH, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "'requests[0].custom_id': has half of a surrogate pair" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([], "must not be an empty list"),
        ([*requests(2), *requests(1)], "requests[2] is not valid: 'custom_id' must be another one for each line."),
        ([{"custom_id": "a", "params": params(stream=True)}], "requests[0] is not valid: 'stream' must not be true"),
        ([{"custom_id": "a", "params": 5}], "must be an object, got an integer"),
        ([{"custom_id": 5, "params": params()}], "must be a string, got an integer"),
        ([{"custom_id": "a"}], "params"),
    ],
)
def test_a_wrong_batch_is_refused_as_a_whole(sdk: Anthropic, given: list[Any], reason: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refusal:
        sdk.messages.batches.create(requests=given)
    assert reason in str(refusal.value)


def test_a_batch_is_cancelled_with_what_it_has_and_deleted_then(served: WorldServed, sdk: Anthropic) -> None:
    served.engine.script = waits_for(3)
    batch = sdk.messages.batches.create(requests=requests(40))
    served.settle()
    assert counts_of(sdk.messages.batches.retrieve(batch.id)) == {"processing": 37, "succeeded": 3}
    with pytest.raises(anthropic.BadRequestError, match="The batch is being processed"):
        sdk.messages.batches.delete(batch.id)
    assert "being processed" in served.http.get(f"{PATH}/{batch.id}/results").json()["error"]["message"]
    cancelled = sdk.messages.batches.cancel(batch.id)
    assert (cancelled.processing_status, counts_of(cancelled)) == ("ended", {"succeeded": 3, "canceled": 37})
    assert cancelled.cancel_initiated_at == cancelled.ended_at is not None
    kinds = [one.result.type for one in sdk.messages.batches.results(batch.id)]
    assert (kinds.count("succeeded"), kinds.count("canceled")) == (3, 37)
    assert sdk.messages.batches.delete(batch.id).type == "message_batch_deleted"
    for ask in (sdk.messages.batches.retrieve, sdk.messages.batches.cancel, sdk.messages.batches.delete):
        with pytest.raises(anthropic.NotFoundError, match="There is no batch"):
            ask(batch.id)


def test_a_batch_that_expires_keeps_its_answers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CHECK_SECONDS", 0.01)
    engine = FakeEngine(runtime=place.world)
    engine.script = waits_for(1)
    plugins = [plugin, messages_plugin]
    config = Config("org/demo", ServerOptions())
    app = create_app(config, engine, FakeTelemetry(), plugins=plugins, runtime=place.world)
    with place.running(app) as url, place.anthropic_of(url) as sdk:
        batch = sdk.messages.batches.create(requests=requests(2))
        place.world.settle()
        assert sdk.messages.batches.retrieve(batch.id).request_counts.succeeded == 1
        place.world.pause(25 * 3600)
        place.world.settle()
        assert counts_of(after_its_end(sdk, batch)) == {"succeeded": 1, "expired": 1}
        kinds = {one.result.type for one in sdk.messages.batches.results(batch.id)}
        assert kinds == {"succeeded", "expired"}


def test_batches_of_both_apis_are_apart(served: Served, sdk: Anthropic) -> None:
    messages = after_its_end(sdk, sdk.messages.batches.create(requests=requests(1)))
    with served.sdk() as openai:
        other = ended(openai, begin(openai, line(1)))
        assert messages.id not in [one.id for one in openai.batches.list()]
        assert not any(one.filename.startswith("msgbatch_") for one in openai.files.list())
    assert other.id not in [one.id for one in sdk.messages.batches.list()]
    refused(served.http.get(f"/v1/batches/{messages.id}"), "batch_id", status=404)
    assert served.http.get(f"{PATH}/{other.id}").json()["error"]["type"] == "not_found_error"


def test_batches_are_listed_in_pages_in_both_directions(served: Served, sdk: Anthropic) -> None:
    known = len([*sdk.messages.batches.list()])
    ids = [after_its_end(sdk, sdk.messages.batches.create(requests=requests(1))).id for _ in range(3)][::-1]
    assert [one.id for one in sdk.messages.batches.list(limit=1)][:3] == ids, "it reads all pages"
    first = sdk.messages.batches.list(limit=2)
    assert ([one.id for one in first.data], first.has_more) == (ids[:2], True)
    assert (first.first_id, first.last_id) == (ids[0], ids[1])
    rest = sdk.messages.batches.list(limit=100, after_id=ids[1])
    assert (rest.data[0].id, len(rest.data), rest.has_more) == (ids[2], 1 + known, False)
    before = sdk.messages.batches.list(limit=1, before_id=ids[2])
    assert ([one.id for one in before.data], before.has_more) == ([ids[1]], True)
    assert [one.id for one in sdk.messages.batches.list(before_id=ids[2]).data] == ids[:2]
    for query in ({"after_id": "none"}, {"before_id": "none"}, {"after_id": ids[0], "before_id": ids[1]}):
        assert served.http.get(PATH, params=query).status_code == 400
