"""The front of several models: what it shows to whom while none is loaded, and what it lets models answer.

The models are doubles: the routes of a server with scripted engines, in a world.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from oaiserve.app import create_app
from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.errors import StartupError
from oaiserve.http.refusals import RECORDED_NS, Refusals
from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugin_loading import own_plugins
from oaiserve.plugins.gateway.basics import version
from oaiserve.plugins.gateway.options import ModelsOptions
from oaiserve.plugins.gateway.several.app import Load, create_front
from oaiserve.plugins.gateway.several.folder import ModelsFolder
from oaiserve.plugins.gateway.several.loaded import LoadedModel, load
from oaiserve.plugins.gateway.several.models import LOOK_SECONDS
from oaiserve.plugins.gateway.several.settings import models_of
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.runtime import Runtime
from tests.batching import answers, begin, ended, line
from tests.plugins.gateway.doubles import OPTIONS
from tests.routes.asking import bearer
from tests.routes.doubles import FakeEngine, FakeTelemetry, says, starts
from tests.world.serving import Place, PlacedServer

Front = Callable[..., httpx.Client]
INSIDE = (
    *("/dashboard", "/requests", "/requests/x", "/clients"),
    *("/dashboard/feed", "/debug/requests", "/debug/requests/x", "/debug/clients"),
    *("/debug/report", "/debug//report", "/%2fdebug/report", "/debug/requests?model=demo"),
)


@pytest.fixture
def front(place: Place) -> Iterator[Callable[..., httpx.Client]]:
    """Return a function that starts a gateway of models, none of which is loaded, and returns its client."""
    with ExitStack() as stack:

        def start(server: ServerOptions, *models: str) -> httpx.Client:
            config = Config("models", server, of_plugins=(ModelsOptions(load_on_demand=True),))
            configs = models_of(models or ["demo"], {}, config)
            return stack.enter_context(serving(place, config, configs))

        yield start


@contextmanager
def serving(
    place: Place,
    config: Config,
    configs: dict[str, Config],
    plugins: list[Plugin] | None = None,
    load_model: Load = load,
) -> Iterator[httpx.Client]:
    app, front, _ = create_front(config, configs, plugins, place.world, load_model)
    with PlacedServer(place, app, config.server, on_drain=front.drain) as server, place.plain(server.url) as http:
        yield http


@pytest.mark.parametrize("path", INSIDE)
def test_a_public_front_without_keys_shows_nobody_the_inside(front: Front, path: str) -> None:
    client = front(ServerOptions(host="0.0.0.0"))
    answer = client.get(path)
    assert answer.status_code == 404
    assert "shows other people's requests" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
def test_a_route_in_front_with_a_path_that_is_taken_stops_the_start(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ModelsFolder()
    monkeypatch.setattr("oaiserve.plugins.gateway.several.app.ModelsFolder", lambda: folder)
    plugin = Plugin(name="second", routes=lambda config: [Route(path, version)], inner=InnerParts(is_in_front=True))
    config = Config("models")
    configs = models_of(["demo"], {}, config)

    with pytest.raises(StartupError, match=f"has the route '{path}', which there is already"):
        create_front(config, configs, [plugin])

    folder.remove()


def test_a_front_with_keys_asks_for_one(front: Front) -> None:
    client = front(ServerOptions(host="0.0.0.0", api_key=("mine",)))
    for path in ("/v1/models", *INSIDE[4:]):
        assert client.get(path).status_code == 401, path
    listed = client.get("/v1/models", headers={"authorization": "Bearer mine"})
    assert [(model["id"], model["is_loaded"]) for model in listed.json()["data"]] == [("demo", False)]
    assert client.get("/v1/models/none", headers={"authorization": "Bearer mine"}).status_code == 404


def test_model_that_is_not_loaded_has_the_task_of_its_files(front: Front, tmp_path: Path) -> None:
    for name, config in (
        ("embed", '{"architectures": ["BertModel"]}'),
        ("chat", '{"architectures": ["LlamaForCausalLM"]}'),
        ("damaged", "{"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    folders = [str(tmp_path / name) for name in ("embed", "chat", "damaged")]
    client = front(ServerOptions(), *folders, "org/elsewhere")
    tasks = [model.get("task") for model in client.get("/v1/models").json()["data"]]
    assert tasks == ["embed", "generate", None, None]


def test_model_that_is_not_loaded_has_the_task_of_its_settings(place: Place) -> None:
    config = Config("models", of_plugins=(ModelsOptions(load_on_demand=True),))
    configs = models_of([], {"a": {"model": "demo", "task": "embed"}}, config)
    with serving(place, config, configs) as client:
        (model,) = client.get("/v1/models").json()["data"]
    assert model["task"] == "embed"


def test_model_that_is_not_loaded_has_the_task_of_its_files_in_the_hub_cache(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--org--embed/snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["BertModel"]}')
    (folder / "model.safetensors").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    client = front(ServerOptions(), "org/embed")
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["task"]) == ("org/embed", "embed")


def test_a_front_finds_a_model_by_its_path(front: Front, tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    file.touch()
    client = front(ServerOptions(), str(file), "demo")
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["small", "demo"]
    assert client.get(f"/v1/models/{quote(str(file), safe='')}").json()["id"] == "small"
    missing = client.get("/v1/models/other").json()["error"]["message"]
    assert missing.endswith("This server serves 'small', 'demo'.")


def test_a_front_of_one_model_lists_each_of_its_names(front: Front) -> None:
    client = front(ServerOptions(served_model_name=("mine", "gpt-4o")))
    listed = client.get("/v1/models").json()["data"]
    assert [(model["id"], model["is_loaded"]) for model in listed] == [("mine", False), ("gpt-4o", False)]
    assert client.get("/v1/models/gpt-4o").json()["root"] == listed[0]["root"]


@pytest.mark.plugin("keys")
def test_the_front_knows_stored_keys_and_refuses_a_model_before_it_is_loaded(place: Place, tmp_path: Path) -> None:
    from oaiserve.plugins.keys import with_runtime
    from oaiserve.plugins.keys.key_table import KeyTable
    from oaiserve.plugins.keys.options import KeysOptions

    options = (KeysOptions(stored_keys=True), StoreOptions(response_store=tmp_path / "store"))
    with closing(KeyTable(tmp_path / "store")) as table:
        admin, alice = (
            {"authorization": f"Bearer {table.add(name, values)}"}
            for name, values in (("admin", {"role": "admin"}), ("alice", {"models": ["other"]}))
        )
    config = Config("models", of_plugins=(ModelsOptions(load_on_demand=True), *options))
    plugins = [with_runtime(place.world) if part.name == "keys" else part for part in own_plugins()]
    with serving(place, config, models_of(["demo"], {}, config), plugins) as client:
        answer = client.post("/v1/completions", json={"model": "demo", "prompt": "Hello"}, headers=alice)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_found")
        assert not client.get("/v1/models", headers=alice).json()["data"][0]["is_loaded"]
        assert {client.get(path, headers=alice).status_code for path in ("/admin/keys", "/debug/requests")} == {403}
        assert [key["name"] for key in client.get("/admin/keys", headers=admin).json()["keys"]] == ["admin", "alice"]


def test_a_model_that_is_not_served_is_told_to_be_unknown(front: Front) -> None:
    client = front(ServerOptions())
    answer = client.post("/v1/completions", json={"model": "other", "prompt": "Hello"})
    assert answer.status_code == 404
    assert "'other' does not exist. This server serves 'demo'" in answer.json()["error"]["message"]


def test_a_form_names_its_model(front: Front) -> None:
    client = front(ServerOptions())
    answer = client.post("/v1/audio/transcriptions", data={"model": "other"}, files={"file": ("a.wav", b"RIFF")})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "'other' does not exist" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["../two", "%00", "%ff", "ü", "a" * 5000])
def test_requests_of_an_unknown_model_are_not_found(front: Front, name: str) -> None:
    client = front(ServerOptions())
    answer = client.get(f"/debug/requests?model={name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


# -- with loaded models -----------------------------------------------------------------------------------------------


class Metrics(FakeTelemetry):
    def render(self, accept: str, names_clients: bool = True) -> tuple[bytes, str]:
        return b"# TYPE up gauge\nup 1\n# TYPE process_open_fds gauge\nprocess_open_fds 1\n", "text/plain"


class Loads:
    """Loads doubles: the engines are scripted, the routes are real."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.engines: dict[str, FakeEngine] = {}  # the last one of each model

    async def load(self, config: Config, front: Starlette, runtime: Runtime) -> LoadedModel:
        self.engines[config.model_name] = engine = FakeEngine(runtime=runtime)
        engine.script = says(config.model_name)
        telemetry: Any = Metrics(self.place.world)
        plugins = [plugin for plugin in own_plugins() if not plugin.inner.is_in_front]
        app = create_app(config, engine, telemetry, plugins=plugins, front=front, runtime=runtime)
        loaded = LoadedModel(app, engine, lambda: 1)
        await loaded.begin()
        return loaded

    def sdk_of(self, http: httpx.Client, key: str = "any") -> openai.OpenAI:
        return self.place.sdk_of(str(http.base_url), key)


Running = Callable[..., tuple[httpx.Client, Loads]]


@pytest.fixture
def running(place: Place) -> Iterator[Running]:
    """Return a function that starts a server of models with these names."""
    with ExitStack() as stack:

        def start(models: str, server: ServerOptions = OPTIONS, **engine: Any) -> tuple[httpx.Client, Loads]:
            loads = Loads(place)
            config = Config("models", server, EngineOptions(**engine), of_plugins=(ModelsOptions(load_on_demand=True),))
            configs = models_of([f"{name}=demo" for name in models], {}, config)
            http = stack.enter_context(serving(place, config, configs, load_model=loads.load))
            if server.api_key:
                http.headers.update(bearer(server.api_key[0]))
            return http, loads

        yield start


@pytest.mark.plugin("batches")
def test_lines_of_a_batch_go_to_their_models_as_work_of_their_key(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerOptions(drain_timeout_seconds=0, api_key=("mine",))
    http, loads = running("abc", server)
    sdk = loads.sdk_of(http, "mine")
    batch = ended(sdk, begin(sdk, *(line(number, model=name) for number, name in enumerate("abax", start=1))))
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 4, 3, 1)
    found = [one["response"]["body"] for one in answers(sdk, batch.output_file_id)]
    assert [body["choices"][0]["message"]["content"] for body in found] == ["a", "b", "a"]
    (failed,) = answers(sdk, batch.error_file_id)
    assert failed["response"]["body"]["error"]["code"] == "model_not_found"
    assert [*loads.engines] == ["a", "b"], "c is not loaded, as nobody needs it"
    request = loads.engines["b"].submitted.get()
    assert (request.is_background, request.client) == (True, "key-1 in the background")
    assert [one.id for one in sdk.batches.list()] == [batch.id]


def test_model_whose_engine_has_failed_is_loaded_again(running: Running) -> None:
    http, loads = running("ab")
    assert http.post("/v1/completions", json={"model": "a", "prompt": "Hi"}).status_code == 200
    first = loads.engines["a"]
    first.failure = RuntimeError("It has ended 3 times within a minute.")
    loads.place.world.settle(LOOK_SECONDS + 1)
    assert not http.get("/v1/models/a").json()["is_loaded"], "it is loaded on demand"
    assert http.post("/v1/completions", json={"model": "a", "prompt": "Hi"}).status_code == 200
    assert loads.engines["a"] is not first


@pytest.mark.plugin("batches")
def test_refused_line_is_charged_only_while_another_client_has_a_request(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oaiserve.plugins.batches.refused_lines import RefusedLines

    charged_ns: list[int] = []
    monkeypatch.setattr(RefusedLines, "refuse", lambda _, owner, cpu_ns, before_ns: charged_ns.append(cpu_ns))
    http, loads = running("a")
    sdk = loads.sdk_of(http)
    wrong = [line(number, model="a", temperature=-3) for number in range(8)]
    assert ended(sdk, begin(sdk, *wrong)).request_counts.failed == 8
    assert charged_ns == [], "the other lines of a batch are no other client's"
    loads.engines["a"].script = starts("One")
    with http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}) as stream:
        parts = stream.iter_bytes()  # Without this name, the stream would end with its first part.
        assert b"One" in next(parts)
        ended(sdk, begin(sdk, wrong[0]))
    assert len(charged_ns) == 1
    assert charged_ns[0] > 0


def test_metrics_have_the_name_of_each_loaded_model(running: Running) -> None:
    http, _ = running("abc")
    for model in "ab":
        assert http.post("/v1/completions", json={"model": model, "prompt": "Hi"}).status_code == 200
    text = http.get("/metrics").text
    assert 'oaiserve_model_loaded{served_model="a"} 1' in text
    assert [model for model in "abc" if f'up{{served_model="{model}"}} 1' in text] == ["a", "b"]
    assert "process_open_fds{" not in text, "all models share this process"


def test_refusal_of_a_model_is_held_back_once_and_charged_to_the_client(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    charges: list[tuple[bytes, float]] = []

    def charge(_: Refusals, client: bytes, cpu_ns: float = 0) -> int:
        charges.append((client, cpu_ns))
        return 1_000_000

    monkeypatch.setattr(Refusals, "charge", charge)
    http, _ = running("a")
    answer = http.post("/v1/completions", json={"prompt": 7}, headers={"x-forwarded-for": "192.0.2.7"})
    assert answer.status_code == 400
    assert "oaiserve_gateway_refusal_delay_seconds_total 0.001" in http.get("/metrics").text
    ((client, cpu_ns),) = charges
    assert client == b"127.0.0.1"
    assert cpu_ns >= RECORDED_NS


def test_front_that_never_starts_leaves_no_folder(tmp_path: Path) -> None:
    code = (
        "from oaiserve.plugins.gateway.several.app import *\ncreate_front(Config('models'), {'demo': Config('demo')})"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=True)
    assert [*tmp_path.iterdir()] == []


def test_adapter_is_loaded_into_the_model_that_the_query_names(running: Running, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    body = {"lora_name": "sql", "lora_path": "folder"}
    http, _ = running("ab", lora_dir=tmp_path)
    unnamed = http.post("/v1/load_lora_adapter", json=body)
    assert (unnamed.status_code, "?model=a" in unnamed.text) == (400, True)
    assert http.post("/v1/load_lora_adapter?model=b", json={**body, "lora_name": "a"}).status_code == 400
    assert http.post("/v1/load_lora_adapter?model=b", json=body).json()["parent"] == "b"
    answer = http.post("/v1/completions", json={"model": "sql", "prompt": "Hi"})
    assert answer.json()["choices"][0]["text"] == "b"
    assert {model["id"] for model in http.get("/v1/models").json()["data"]} == {"a", "b", "sql"}
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200
    assert http.post("/v1/completions", json={"model": "sql", "prompt": "Hi"}).status_code == 404


def test_tokenizer_of_the_model_in_the_query_is_described(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    http, loads = running("ab")
    assert http.get("/tokenizer_info?model=b").status_code == 200
    assert [*loads.engines] == ["b"]
    assert http.get("/tokenizer_info?model=c").json()["error"]["code"] == "model_not_found"


def test_public_gateway_without_keys_lets_nobody_change_adapters(running: Running, tmp_path: Path) -> None:
    server = ServerOptions(host="0.0.0.0", drain_timeout_seconds=0, open_dashboard=True)
    http, _ = running("a", server, lora_dir=tmp_path)
    answer = http.post("/v1/load_lora_adapter?model=a", json={"lora_name": "x", "lora_path": "x"})
    assert (answer.status_code, "changes what others are served" in answer.text) == (404, True)


@pytest.mark.plugin("pages")
def test_live_page_shows_every_model_and_the_feed_of_one(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    http, _ = running("ab")
    assert http.post("/v1/completions", json={"model": "a", "prompt": "Hi"}).status_code == 200

    def hello(path: str) -> Any:
        with http.stream("GET", path) as feed:
            lines = feed.iter_lines()
            assert next(lines) == "event: hello"
            return json.loads(next(lines).removeprefix("data: "))

    fleet = hello("/dashboard/feed")["fleet"]
    assert [(one["models"], one["state"]) for one in fleet["replicas"]] == [(["a"], "Up"), (["b"], "Not loaded")]
    assert hello("/dashboard/feed?model=a")["model"] == "a"


def test_server_is_not_ready_while_an_engine_hangs(running: Running) -> None:
    http, loads = running("ab")
    assert [http.post("/v1/completions", json={"model": model, "prompt": "Hi"}).status_code for model in "ab"] == [
        200
    ] * 2
    loads.engines["a"].hang = "The engine thread hangs."
    ready = http.get("/ready")
    assert (ready.status_code, "'a' does not respond" in ready.text) == (503, True)
    loads.engines["a"].hang = ""
    assert http.get("/ready").status_code == 200


@pytest.mark.plugin("responses")
def test_response_of_one_model_is_read_deleted_and_continued_by_another(running: Running) -> None:
    http, loads = running("ab")
    first = http.post("/v1/responses", json={"model": "a", "input": "Hi"}).json()
    second = http.post("/v1/responses", json={"model": "b", "input": "Ho", "previous_response_id": first["id"]})
    assert second.status_code == 200, second.text
    assert [*loads.engines] == ["a", "b"]
    path = f"/v1/responses/{second.json()['id']}"
    assert http.get(path).json()["model"] == "b"
    assert http.delete(path).status_code == 200
    assert http.get(path).status_code == 404


def test_requests_of_all_models_are_listed_and_found_without_a_name(running: Running) -> None:
    http, loads = running("ab")
    assert http.post("/v1/completions", json={"model": "a", "prompt": "Hi"}).status_code == 200
    assert http.post("/v1/completions", json={"model": "b", "prompt": "Hi"}).status_code == 200
    loads.engines["b"].script = starts("One")
    body = {"model": "b", "prompt": "Hi", "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "mine"}) as stream:
        parts = stream.iter_bytes()
        assert b"One" in next(parts)
        assert http.get("/debug/requests/mine").json()["request_id"] == "mine"
        listed = http.get("/debug/requests").json()["requests"]
        assert [(row["model"], row["replica"]) for row in listed] == [("b", 2), ("a", 1)]
        listed = http.get("/debug/requests?model=a").json()["requests"]
        assert [row["model"] for row in listed] == ["a"]


def test_client_that_leaves_ends_its_request(running: Running) -> None:
    http, loads = running("ab")
    assert http.post("/v1/completions", json={"model": "b", "prompt": "Hi"}).status_code == 200
    loads.engines["b"].script = starts("One")
    with http.stream("POST", "/v1/completions", json={"model": "b", "prompt": "Hi", "stream": True}) as stream:
        parts = stream.iter_bytes()  # Without this name, the stream would end with its first part.
        next(parts)
        loads.engines["b"].submitted.get()
    loads.place.world.wait_for(lambda: not loads.engines["b"].aborted.empty())


def test_unknown_path_and_method_get_the_advice_of_the_models_routes(running: Running) -> None:
    http, loads = running("ab")
    for _ in range(2):
        unknown = http.post("/v1/completion", json={"model": "b"})
        assert (unknown.status_code, "/v1/completions" in unknown.text) == (404, True)
        wrong = http.get("/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert [*loads.engines] == [], "neither loads a model"
        loads.engines.clear()
        assert http.post("/v1/completions", json={"model": "b", "prompt": "Hi"}).status_code == 200
        loads.engines.clear()


def test_report_loads_no_model(running: Running) -> None:
    http, loads = running("ab")
    assert http.get("/debug/report").status_code == 503
    assert [*loads.engines] == []
    assert http.get("/debug/report?model=b").status_code == 200
    assert [*loads.engines] == ["b"]
    assert http.get("/debug/report").json()["models"] == ["b"]
