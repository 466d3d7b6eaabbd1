"""Tests the routes for models, for the tokenizer, and for operators."""

from concurrent.futures import Future
from pathlib import Path
from urllib.parse import quote

import pytest

from oaiserve import __version__
from oaiserve.errors import Overloaded
from tests.routes.asking import refused
from tests.serving import Serve, Served
from tests.world.serving import WorldServed


def test_the_one_model_is_listed(served: Served) -> None:
    (model,) = served.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("org/demo", "model", 4096)
    assert isinstance(model["created"], int)


@pytest.mark.parametrize("name", ["org/demo", "org%2Fdemo"])
def test_a_model_with_a_slash_is_found(served: Served, name: str) -> None:
    assert served.http.get(f"/v1/models/{name}").json()["id"] == "org/demo"


def test_model_whose_name_is_a_path_is_found_by_its_encoded_name(serve: Serve) -> None:
    served = serve(served_model_name=("/models/a.gguf", "a//b/"))
    for name in ("/models/a.gguf", "a//b/"):
        assert served.http.get(f"/v1/models/{quote(name, safe='')}").json()["id"] == name


def test_a_model_may_be_served_under_other_names_of_which_answers_have_the_first(serve: Serve) -> None:
    served = serve(served_model_name=("mine", "gpt-4o"))
    for name in ("mine", "gpt-4o"):
        assert served.complete(model=name).json()["model"] == "mine"
        assert served.telemetry.next_record().model == "mine"
        assert served.http.get(f"/v1/models/{name}").json()["id"] == name
    refused(served.complete(model="org/demo"), "model", "This server serves 'mine', 'gpt-4o'", status=404)
    listed = served.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"]) for model in listed] == [("mine", "org/demo"), ("gpt-4o", "org/demo")]
    assert served.http.get("/debug/report").json()["models"] == ["mine", "gpt-4o"]


def test_a_model_from_a_path_has_its_short_name_and_may_be_named_by_the_path(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "small-Q4_K_M.gguf"
    file.touch()
    served = serve(model=str(file))
    for name in ("small-Q4_K_M", str(file)):
        assert served.complete(model=name).json()["model"] == "small-Q4_K_M"
        assert served.telemetry.next_record().model == "small-Q4_K_M"
        assert served.http.get(f"/v1/models/{quote(name, safe='')}").json()["id"] == "small-Q4_K_M"
        assert served.post("/tokenize", prompt="ab", model=name).status_code == 200
    (listed,) = served.http.get("/v1/models").json()["data"]
    assert (listed["id"], listed["root"]) == ("small-Q4_K_M", str(file))
    report = served.http.get("/debug/report").json()
    assert (report["models"], report["aliases"]) == (["small-Q4_K_M"], [str(file)])
    refused(served.complete(model="other"), "model", "This server serves 'small-Q4_K_M'.", status=404)


def test_the_list_of_models_says_whether_one_can_chat(serve: Serve) -> None:
    for template, can in ((None, False), ("{{ messages }}", True)):
        (model,) = serve(template=template).http.get("/v1/models").json()["data"]
        assert (model["has_chat_template"], "no chat template" in model.get("description", "")) == (can, not can)


def test_text_and_messages_can_be_tokenized(served: Served) -> None:
    answer = served.post("/tokenize", prompt="ab", return_token_strs=True).json()
    assert answer == {"count": 2, "max_model_len": 4096, "tokens": [97, 98], "token_strs": ["a", "b"]}
    messages = [{"role": "user", "content": "ab"}]
    answer = served.post("/tokenize", messages=messages, model="org/demo").json()
    assert answer == {"count": 2, "max_model_len": 4096, "tokens": [97, 98], "token_strs": None}


def test_an_empty_text_has_no_tokens(served: Served) -> None:
    answer = served.post("/tokenize", prompt="", return_token_strs=True).json()
    assert answer == {"count": 0, "max_model_len": 4096, "tokens": [], "token_strs": []}


def test_the_tokenizer_is_described(serve: Serve) -> None:
    assert serve(template="{{ messages }}").http.get("/tokenizer_info").json() == {
        "bos_token": None,
        "eos_token": "<special>",
        "unk_token": None,
        "pad_token": None,
        "chat_template": "{{ messages }}",
    }


@pytest.mark.parametrize(("model", "status"), [("org/demo", 200), ("other", 404)])
def test_the_tokenizer_is_described_for_a_model_of_the_server(served: Served, model: str, status: int) -> None:
    assert served.http.get("/tokenizer_info", params={"model": model}).status_code == status


def test_tokens_can_be_detokenized(served: Served) -> None:
    assert served.post("/detokenize", tokens=[97, 98]).json() == {"prompt": "ab"}
    assert served.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_the_tokenizers_routes_take_turns_as_clients_with_bodies_of_their_size(served: Served) -> None:
    served.post("/tokenize", prompt="a" * 1000)
    served.post("/detokenize", tokens=[97] * 1000)
    client, num_bytes = served.engine.turns.get()
    _, more_bytes = served.engine.turns.get()
    assert client == "127.0.0.1"
    assert (num_bytes > 1000, more_bytes > 2000) == (True, True)


def test_the_tokenizers_routes_are_refused_as_other_work_is(served: Served) -> None:
    served.engine.submit_error = Overloaded("Too much.", retry_after_seconds=3)
    for path, body in (("/tokenize", {"prompt": "ab"}), ("/detokenize", {"tokens": [97]})):
        response = served.post(path, **body)
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")


def test_texts_and_lists_of_ids_of_any_context_are_counted_but_not_of_any_length(served: Served) -> None:
    most = 2**18
    answer = served.post("/tokenize", prompt="a" * most, return_token_strs=True).json()
    assert (answer["count"], answer["tokens"], answer["token_strs"]) == (most, [97] * most, ["a"] * most)
    assert served.post("/detokenize", tokens=[97] * most).json() == {"prompt": "a" * most}
    for path, body in (("/tokenize", {"prompt": "a" * (most + 1)}), ("/detokenize", {"tokens": [97] * (most + 1)})):
        refused(served.post(path, **body), next(iter(body)), f"at most {most}")


def test_work_with_the_tokenizer_ends_when_its_client_leaves(
    served: WorldServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    future: Future[bytes] = Future()
    began: list[str] = []

    def never(work: object, *, client: str, num_bytes: int) -> Future[bytes]:
        began.append(client)
        return future

    monkeypatch.setattr(served.engine, "run_in_turns", never)
    with served.connect() as client:
        body = b'{"prompt": "ab"}'
        head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        served.settle()
        assert began
    served.settle()
    assert future.cancelled()


def test_a_server_that_can_serve_is_healthy_and_ready(served: Served) -> None:
    for path in ("/health", "/ready"):
        response = served.http.get(path)
        assert (response.status_code, response.content) == (200, b"")


def test_a_server_that_drains_is_healthy_but_not_ready(served: Served) -> None:
    served.engine.is_ready = False
    assert served.http.get("/health").status_code == 200
    refused(served.http.get("/ready"), None, status=503, code="service_unavailable")


def test_a_server_whose_engine_hangs_is_neither_healthy_nor_ready(served: Served) -> None:
    served.engine.hang = "wait, a step of decode"
    for path in ("/health", "/ready"):
        refused(served.http.get(path), None, status=503, code="service_unavailable")
    served.engine.hang = ""
    assert served.http.get("/health").status_code == 200


def test_the_version_can_be_read(served: Served) -> None:
    assert served.http.get("/version").json() == {"version": __version__}


def test_metrics_come_in_the_form_that_the_scraper_accepts(served: Served) -> None:
    response = served.http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.text == "# accept: application/openmetrics-text\n# names clients"
    assert response.headers["content-type"] == "text/plain; version=0.0.4"


@pytest.mark.parametrize(("accepted", "coding"), [("gzip", "gzip"), ("gzip;q=0", None), ("identity", None)])
def test_metrics_are_compressed_for_a_scraper_that_reads_gzip(
    served: Served, accepted: str, coding: str | None
) -> None:
    response = served.http.get("/metrics", headers={"accept": "x", "accept-encoding": accepted})
    assert (response.text, response.headers.get("content-encoding")) == ("# accept: x\n# names clients", coding)


def test_head_is_answered_like_get(served: Served) -> None:
    assert served.http.head("/health").status_code == 200
