"""Servers behind one gateway with models, responses, files and batches of their own: each is found where it is."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from openai import OpenAI

from tests.missing_plugins import is_served
from tests.plugins.gateway.doubles import SIGNATURE, Fleet, fleet
from tests.published import published
from tests.world.serving import Place


@pytest.fixture
def two_models(place: Place) -> Iterator[Fleet]:
    """Two servers of a model "m", and one of "other"."""
    with fleet(place, 2) as running:
        running.add(model="other")
        running.wait_until_known()
        running.wait_for(lambda: running.gateway.router.differ)
        yield running


def test_a_request_goes_to_a_server_with_its_model(two_models: Fleet) -> None:
    other = [*two_models.replicas][2]
    for number in range(8):
        for model, is_other in (("m", False), ("other", True)):
            answer = two_models.ask(f"{number}", body={"model": model})
            assert answer.status_code == 200
            assert answer.json()["model"] == model
            assert (answer.headers[SIGNATURE] == other) == is_other


def test_tokenizer_of_the_model_in_the_query_is_described(two_models: Fleet) -> None:
    other = [*two_models.replicas][2]
    for model in ("m", "other") * 4:
        answer = two_models.http.get("/tokenizer_info", params={"model": model})
        assert (answer.status_code, answer.headers[SIGNATURE] == other) == (200, model == "other")
    assert two_models.http.get("/tokenizer_info?model=none").status_code == 404


def test_a_path_names_the_same_model_before_and_behind_the_gateway(place: Place, tmp_path: Path) -> None:
    files = [tmp_path / folder / f"{name}.gguf" for folder, name in (("here", "m"), ("there", "m"), ("here", "other"))]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    with fleet(place, 0) as running:
        replicas = [running.add(model=str(file)) for file in files]
        running.wait_for(lambda: running.gateway.router.differ and len(running.watch.joined) == 3)
        for file, replica in zip(files, replicas, strict=True):
            answers = [running.ask(f"{number}", body={"model": str(file)}) for number in range(8)]
            assert {answer.headers[SIGNATURE] for answer in answers} == {replica.name}
            assert {answer.json()["model"] for answer in answers} == {file.stem}
            assert running.http.get(f"/v1/models/{quote(str(file), safe='')}").json()["id"] == file.stem
        listed = running.http.get("/v1/models").json()["data"]
        assert sorted(model["id"] for model in listed) == ["m", "other"], "in the order of the replicas' ports"


def test_a_model_that_none_has_is_refused_by_a_server(two_models: Fleet) -> None:
    answer = two_models.ask("Hello", body={"model": "none"})
    assert answer.status_code == 404
    assert "'none' does not exist" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/openapi.json", "/debug/requests"])
def test_list_is_only_read(two_models: Fleet, path: str) -> None:
    for method in ("POST", "DELETE"):
        assert two_models.http.request(method, path).status_code in (404, 405), method


def test_the_list_has_all_models_once(two_models: Fleet) -> None:
    listed = two_models.http.get("/v1/models").json()
    assert sorted(model["id"] for model in listed["data"]) == ["m", "other"]
    for name in ("m", "other"):
        assert two_models.http.get(f"/v1/models/{name}").json()["id"] == name
    page = two_models.http.get("/v1/models?limit=1", headers={"anthropic-version": "2023-06-01"}).json()
    assert (page["data"][0]["type"], page["last_id"], page["has_more"]) == ("model", page["data"][0]["id"], True)


def test_schema_has_the_routes_of_the_gateway(two_models: Fleet) -> None:
    answer = two_models.http.get("/openapi.json", headers={"accept": "text/html"})
    paths = answer.json()["paths"].keys()
    assert "\n  " in answer.text
    assert paths >= {*filter(is_served, ("/v1/chat/completions", "/v1/models", "/dashboard", "/docs"))}
    for path in paths:
        if "{" not in path and path != "/dashboard/feed":
            assert "is about one replica" not in two_models.http.get(path).text, path
    assert "/debug/report" in published()["paths"].keys() - paths


@pytest.mark.plugin("responses")
def test_a_stored_response_is_found_at_the_server_that_has_it(two_models: Fleet) -> None:
    made = two_models.http.post("/v1/responses", json={"model": "other", "input": "Hello", "max_output_tokens": 16})
    assert made.status_code == 200, made.text
    path = f"/v1/responses/{made.json()['id']}"
    assert all(two_models.http.get(path).json()["id"] == made.json()["id"] for _ in range(3))
    assert two_models.http.delete(path).status_code == 200
    assert two_models.http.get(path).status_code == 404


@pytest.fixture
def sdk(place: Place, two_models: Fleet) -> Iterator[OpenAI]:
    with place.sdk_of(two_models.url) as sdk:
        yield sdk


def make_at_several(two_models: Fleet, path: str, make: Callable[[int], None]) -> None:
    """Make 20 objects, of which several servers get some."""
    for number in range(20):
        make(number)
    homes = [name for name in two_models.replicas if two_models.straight(name).get(path).json()["data"]]
    assert len(homes) > 1


@pytest.mark.plugin("batches")
def test_files_and_batches_are_found_at_whichever_server_has_them(place: Place, two_models: Fleet, sdk: OpenAI) -> None:
    files = []
    batches = []

    def make(number: int) -> None:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hello"}}
        content = json.dumps(line).encode()
        files.append(sdk.files.create(file=(f"{number}.jsonl", content), purpose="batch"))
        made = sdk.batches.create(input_file_id=files[-1].id, endpoint="/v1/completions", completion_window="24h")
        batches.append(made.id)

    make_at_several(two_models, "/v1/batches", make)
    place.world.settle(1)
    for batch_id in batches:
        assert sdk.files.content(sdk.batches.retrieve(batch_id).output_file_id).text.count("\n") == 1
        assert sdk.batches.cancel(batch_id).status == "completed"
    assert sorted(batch.id for batch in sdk.batches.list(limit=1)) == sorted(batches), "it reads all pages"
    given = [file.id for file in sdk.files.list(limit=4, purpose="batch")]
    assert sorted(given) == sorted(file.id for file in files)
    times = [file.created_at for file in sdk.files.list()]
    assert times == sorted(times, reverse=True)
    for file in files:
        assert sdk.files.delete(file.id).deleted
    for query in ("limit=0", "limit=many", "colour=1", "after=nobody"):
        assert two_models.http.get(f"/v1/files?{query}").status_code == 400


@pytest.mark.plugin("batches")
def test_files_are_listed_in_anthropics_form_at_whichever_server_has_them(place: Place, two_models: Fleet) -> None:
    with place.anthropic_of(two_models.url) as sdk:
        known = [file.id for file in sdk.beta.files.list()]
        ids: list[str] = []

        def make(number: int) -> None:
            ids.append(sdk.beta.files.upload(file=(f"{number}.txt", b"x")).id)

        make_at_several(two_models, "/v1/files", make)
        listed = [*sdk.beta.files.list(limit=3)]
        assert sorted(file.id for file in listed) == sorted(known + ids), "it reads all pages"
        assert [file.created_at for file in listed] == sorted((file.created_at for file in listed), reverse=True)
        assert {file.id for file in sdk.beta.files.list(ids=ids[:5])} == {*ids[:5]}
        headers = {"anthropic-version": "2023-06-01"}
        order = [file.id for file in listed]
        for query, shown in (
            (f"after_id={order[4]}&limit=2", order[5:7]),
            (f"before_id={order[4]}&limit=2", order[2:4]),
            (f"page=page_{order[-1]}", []),
        ):
            page = two_models.http.get(f"/v1/files?{query}", headers=headers).json()
            assert ([file["id"] for file in page["data"]], page["has_more"]) == (shown, bool(shown))
        for query in ("limit=0", "limit=many", "limit=1001", "colour=1", "page=x", "page=page_x", "after_id=x&page=y"):
            answer = two_models.http.get(f"/v1/files?{query}", headers=headers)
            assert (answer.status_code, answer.json()["type"]) == (400, "error"), query
        for file_id in ids:
            assert sdk.beta.files.retrieve_metadata(file_id).id == file_id
            assert sdk.beta.files.delete(file_id).type == "file_deleted"


@pytest.mark.plugin("batches", "messages")
def test_batches_of_messages_are_found_at_whichever_server_has_them(place: Place, two_models: Fleet) -> None:
    params = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    with place.anthropic_of(two_models.url) as sdk:
        batches = sdk.messages.batches
        ids: list[str] = []

        def make(_: int) -> None:
            ids.append(batches.create(requests=[{"custom_id": "a", "params": params}]).id)

        make_at_several(two_models, "/v1/messages/batches", make)
        listed = [batch.id for batch in batches.list(limit=3)]
        assert sorted(listed) == sorted(ids), "it reads all pages"
        place.world.settle(1)
        assert {batches.retrieve(batch_id).processing_status for batch_id in ids} == {"ended"}
        page = two_models.http.get(f"/v1/messages/batches?before_id={listed[4]}&limit=2").json()
        assert ([batch["id"] for batch in page["data"]], page["has_more"]) == (listed[2:4], True)
        assert "next_page" not in page
        for query in ("limit=0", "limit=many", "colour=1", "page=page_x", "after_id=nobody", "after_id=x&before_id=y"):
            answer = two_models.http.get(f"/v1/messages/batches?{query}")
            assert (answer.status_code, answer.json()["type"]) == (400, "error"), query
        for batch_id in ids:
            assert batches.delete(batch_id).id == batch_id
