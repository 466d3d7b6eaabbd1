"""Requests that name an adapter as their model, and the routes that load and unload adapters."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.engine.types.adapters import AdapterTable
from tests import serving as on_sockets
from tests.routes.asking import refused
from tests.serving import Served
from tests.world.serving import Place, serving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("sql", "chat", "broken"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    return tmp_path / "adapters"


@pytest.fixture
def loading(place: Place, folder: Path) -> Iterator[Served]:
    """A server whose clients may load adapters."""
    with serving(place, Config("org/demo", engine=EngineOptions(lora_dir=folder))) as served:
        yield served


def test_a_request_names_an_adapter_as_its_model(served: Served) -> None:
    number = served.engine.load_adapter("sql", Path("/adapters/sql")).number
    for answer in (served.complete(model="sql"), served.chat(model="sql")):
        assert answer.json()["model"] == "sql"
        assert served.engine.submitted.get().adapter == number > 0
        record = served.telemetry.next_record()
        assert (record.model, record.adapter) == ("sql", "sql")
    served.complete(model="org/demo")
    assert served.engine.submitted.get().adapter == 0
    record = served.telemetry.next_record()
    assert (record.model, record.adapter) == ("org/demo", None)


@pytest.mark.plugin("responses")
def test_streams_and_responses_name_the_adapter(served: Served) -> None:
    served.engine.load_adapter("sql", Path("/adapters/sql"))
    with served.sdk() as client:
        chunks = list(client.completions.create(model="sql", prompt="Hi", stream=True))
        assert {chunk.model for chunk in chunks} == {"sql"}
        assert client.responses.create(model="sql", input="Hi").model == "sql"


def test_adapters_are_listed_with_their_parent(served: Served) -> None:
    served.engine.load_adapter("sql", Path("/adapters/sql"))
    model, adapter = served.http.get("/v1/models").json()["data"]
    assert (model["id"], model["parent"], model["root"]) == ("org/demo", None, "org/demo")
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("sql", "org/demo", "/adapters/sql")
    assert served.http.get("/v1/models/sql").json() == adapter


ANTHROPIC = {"anthropic-version": "2023-06-01"}


def test_clients_of_anthropics_api_get_models_in_its_form_and_in_pages(served: Served) -> None:
    for name in ("a", "b"):
        served.engine.load_adapter(name, Path(f"/adapters/{name}"))
    plain = served.http.get("/v1/models").json()["data"]

    def page(**query: str) -> tuple[list[str], str | None, str | None, bool]:
        listed = served.http.get("/v1/models", params=query, headers=ANTHROPIC).json()
        return [each["id"] for each in listed["data"]], listed["first_id"], listed["last_id"], listed["has_more"]

    assert page(beta="true") == (["org/demo", "a", "b"], "org/demo", "b", False)
    assert page(limit="2") == (["org/demo", "a"], "org/demo", "a", True)
    assert page(limit="2", after_id="a") == (["b"], "b", "b", False)
    assert page(limit="1", before_id="b") == (["a"], "a", "a", True)
    assert page(after_id="b") == ([], None, None, False)
    answer = served.http.get("/v1/models/a", headers=ANTHROPIC)
    assert answer.json().items() >= {**plain[1], "type": "model", "display_name": "a", "lifecycle": "active"}.items()
    assert datetime.fromisoformat(answer.json()["created_at"]).timestamp() == plain[1]["created"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    for query in ({"limit": "0"}, {"limit": "1001"}, {"after_id": "c"}, {"before_id": "c"}):
        refused(served.http.get("/v1/models", params=query, headers=ANTHROPIC), next(iter(query)))
    error = served.http.get("/v1/models/c", headers=ANTHROPIC)
    assert (error.status_code, error.json()["type"], error.json()["error"]["type"]) == (404, "error", "not_found_error")
    assert "type" not in served.http.get("/v1/models/c").json()


def test_an_unknown_name_is_answered_with_what_there_is(served: Served) -> None:
    served.engine.load_adapter("sql", Path("/adapters/sql"))
    says = "The model 'other' does not exist. This server serves 'org/demo', 'sql'."
    refused(served.complete(model="other"), "model", says, status=404, code="model_not_found")


def test_the_tokenizer_is_the_model_s_whatever_adapter_is_named(served: Served) -> None:
    served.engine.load_adapter("sql", Path("/adapters/sql"))
    assert served.post("/tokenize", prompt="ab", model="sql").json()["tokens"] == [97, 98]


def test_an_adapter_is_loaded_and_unloaded_at_run_time(loading: Served, folder: Path) -> None:
    loaded = loading.post("/v1/load_lora_adapter", lora_name="sql", lora_path="sql").json()
    assert (loaded["id"], loaded["parent"], loaded["root"]) == ("sql", "org/demo", str(folder / "sql"))
    assert loading.complete(model="sql").status_code == 200
    assert loading.post("/v1/load_lora_adapter", lora_name="chat", lora_path=str(folder / "chat")).status_code == 200
    refused(loading.post("/v1/load_lora_adapter", lora_name="sql", lora_path="chat"), "lora_name")
    unloaded = loading.post("/v1/unload_lora_adapter", lora_name="sql").json()
    assert unloaded == {"id": "sql", "object": "model", "deleted": True}
    assert loading.complete(model="sql").status_code == 404
    assert loading.post("/v1/unload_lora_adapter", lora_name="sql").status_code == 404


def test_an_adapter_that_is_loaded_again_has_another_number(loading: Served) -> None:
    numbers = []
    for _ in range(2):
        loading.post("/v1/load_lora_adapter", lora_name="sql", lora_path="sql")
        loading.complete(model="sql")
        numbers.append(loading.engine.submitted.get().adapter)
        loading.post("/v1/unload_lora_adapter", lora_name="sql")
    assert numbers[0] != numbers[1]


def test_an_adapter_can_be_replaced_in_place(loading: Served, folder: Path) -> None:
    loading.post("/v1/load_lora_adapter", lora_name="a", lora_path="sql")
    says = 'unload it first, or send "load_inplace": true'
    refused(
        loading.post("/v1/load_lora_adapter", lora_name="a", lora_path="chat", load_inplace=False), "lora_name", says
    )
    assert (
        loading.post("/v1/load_lora_adapter", lora_name="a", lora_path="broken", load_inplace=True).status_code == 400
    )
    assert loading.complete(model="a").status_code == 200
    answer = loading.post("/v1/load_lora_adapter", lora_name="a", lora_path="chat", load_inplace=True).json()
    assert (answer["id"], answer["root"]) == ("a", str(folder / "chat"))
    assert [model["id"] for model in loading.http.get("/v1/models").json()["data"]] == ["org/demo", "a"]
    loading.complete(model="a")
    before, after = (loading.engine.submitted.get().adapter for _ in range(2))
    assert before != after


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *(("lora_path", path) for path in ("..", "../adapters", ".", "none", "/etc", "sql/../../x", "link")),
        *(("lora_path", path) for path in ("a\0b", "x" * 5000, "")),
        *(("lora_name", name) for name in ("", "org/demo", "x" * 201, "a\nb")),
    ],
)
def test_only_folders_in_lora_dir_can_be_loaded_by_a_fitting_name(
    loading: Served, folder: Path, param: str, value: str
) -> None:
    (folder.parent / "outside").mkdir()
    (folder / "link").symlink_to(folder.parent / "outside")
    refused(loading.post("/v1/load_lora_adapter", **{"lora_name": "sql", "lora_path": "sql", param: value}), param)


def test_an_adapter_that_cannot_be_used_is_refused_with_the_reason(loading: Served) -> None:
    refused(loading.post("/v1/load_lora_adapter", lora_name="x", lora_path="broken"), "lora_path", "it is broken")
    assert loading.complete(model="x").status_code == 404


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_without_lora_dir_the_routes_say_how_to_switch_them_on(served: Served, path: str) -> None:
    refused(served.post(path, lora_name="sql", lora_path="sql"), None, "--lora-dir", status=404)


def test_a_public_server_without_keys_lets_nobody_load_adapters(place: Place, folder: Path) -> None:
    with serving(place, Config("org/demo", ServerOptions(host="0.0.0.0"), EngineOptions(lora_dir=folder))) as served:
        refused(served.post("/v1/load_lora_adapter", lora_name="sql", lora_path="sql"), None, "--api-key", status=404)


def test_adapters_that_wait_to_be_loaded_hold_no_thread_that_others_need(folder: Path) -> None:
    go = threading.Event()
    body = {"lora_path": "sql"}
    config = Config("org/demo", engine=EngineOptions(lora_dir=folder))
    with on_sockets.serving(config) as loading, ThreadPoolExecutor(50) as clients:
        loading.engine.adapters = AdapterTable(lambda *_: go.wait())
        loads = [
            clients.submit(loading.post, "/v1/load_lora_adapter", lora_name=f"{number}", **body) for number in range(50)
        ]
        try:
            assert loading.http.get("/metrics").status_code == 200
            assert not any(load.done() for load in loads)
        finally:
            go.set()
    assert [load.result().status_code for load in loads] == [200] * 50
