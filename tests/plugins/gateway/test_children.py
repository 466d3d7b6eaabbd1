"""A gateway of several models: what it shows to whom without a process, and what it sends to processes.

The processes are doubles: servers with scripted engines, in a world.
"""

import asyncio
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
from starlette.routing import Route

from oaiserve.app import create_app
from oaiserve.commands.server_process import Activity
from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.errors import StartupError
from oaiserve.http.refusals import RECORDED_NS, Refusals
from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugin_loading import own_plugins
from oaiserve.plugins.gateway.app import create_gateway_of_models, version
from oaiserve.plugins.gateway.children.folder import ModelsFolder
from oaiserve.plugins.gateway.children.settings import models_of
from oaiserve.plugins.gateway.options import ModelsOptions
from oaiserve.plugins.gateway.watch import USUAL
from oaiserve.storage.store_options import StoreOptions
from oaiserve.wire.address import Address
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
    place: Place, config: Config, configs: dict[str, Config], plugins: list[Plugin] | None = None
) -> Iterator[httpx.Client]:
    app, gateway, _ = create_gateway_of_models(config, configs, plugins, place.world)
    with PlacedServer(place, app, config.server, on_drain=gateway.drain) as server, place.plain(server.url) as http:
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
    monkeypatch.setattr("oaiserve.plugins.gateway.app.ModelsFolder", lambda: folder)
    plugin = Plugin(name="second", routes=lambda config: [Route(path, version)], inner=InnerParts(is_in_front=True))
    config = Config("models")
    configs = models_of(["demo"], {}, config)

    with pytest.raises(StartupError, match=f"has the route '{path}', which there is already"):
        create_gateway_of_models(config, configs, [plugin])

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


def test_a_model_that_no_process_has_is_told_to_be_unknown(front: Front) -> None:
    client = front(ServerOptions())
    answer = client.post("/v1/completions", json={"model": "other", "prompt": "Hello"})
    assert answer.status_code == 404
    assert "'other' does not exist. This server serves 'demo'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["../two", "%00", "%ff", "ü", "a" * 5000])
def test_requests_of_an_unknown_model_are_not_found(front: Front, name: str) -> None:
    client = front(ServerOptions())
    answer = client.get(f"/debug/requests?model={name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


# -- with processes ---------------------------------------------------------------------------------------------------


class Metrics(FakeTelemetry):
    def render(self, accept: str, names_clients: bool = True) -> tuple[bytes, str]:
        return b"# TYPE up gauge\nup 1\n", "text/plain"


class Child:
    """A double of a child process."""

    how_ended = "by SIGKILL"
    num_bytes = 1

    def __init__(self, place: Place, config: Config, address: Address) -> None:
        self.engine = FakeEngine(runtime=place.world)
        self.engine.script = says(config.model_name)
        telemetry: Any = Metrics(place.world)
        app = create_app(config, self.engine, telemetry, runtime=place.world, is_child=True)
        self.server = PlacedServer(place, app, config.server, path=address.path)
        self._ended = asyncio.Event()

    def crash(self) -> None:
        self.server.kill()
        self.server.process.die()
        self._ended.set()

    async def ready(self) -> None:
        self.server.begin()
        await self.server.is_up.wait()

    async def ended(self) -> None:
        await self._ended.wait()

    def activity(self) -> Activity:
        return Activity()

    def kill(self) -> None:
        raise AssertionError("this process is not to be killed")

    async def end(self, drain_seconds: float, /) -> None:
        self.server.should_exit = True
        await self.server.serving
        self._ended.set()


class Children(dict[str, Child]):
    """The processes by their model."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    async def start(self, config: Config, address: Address) -> Child:
        self[config.model_name] = child = Child(self.place, config, address)
        return child

    def sdk_of(self, http: httpx.Client, key: str = "any") -> openai.OpenAI:
        return self.place.sdk_of(str(http.base_url), key)


Running = Callable[..., tuple[httpx.Client, Children]]


@pytest.fixture
def running(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Return a function that starts a gateway of models with these names, and doubles of their processes."""
    with ExitStack() as stack:

        def start(models: str, server: ServerOptions = OPTIONS, **engine: Any) -> tuple[httpx.Client, Children]:
            children = Children(place)
            monkeypatch.setattr("oaiserve.plugins.gateway.app.start_on", children.start)
            config = Config("models", server, EngineOptions(**engine), of_plugins=(ModelsOptions(load_on_demand=True),))
            configs = models_of([f"{name}=demo" for name in models], {}, config)
            http = stack.enter_context(serving(place, config, configs))
            if server.api_key:
                http.headers.update(bearer(server.api_key[0]))
            return http, children

        yield start


@pytest.mark.plugin("batches")
def test_lines_of_a_batch_go_to_their_models_as_work_of_their_key(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerOptions(drain_timeout_seconds=0, api_key=("mine",))
    http, children = running("abc", server)
    sdk = children.sdk_of(http, "mine")
    batch = ended(sdk, begin(sdk, *(line(number, model=name) for number, name in enumerate("abax", start=1))))
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 4, 3, 1)
    found = [one["response"]["body"] for one in answers(sdk, batch.output_file_id)]
    assert [body["choices"][0]["message"]["content"] for body in found] == ["a", "b", "a"]
    (failed,) = answers(sdk, batch.error_file_id)
    assert failed["response"]["body"]["error"]["code"] == "model_not_found"
    assert [*children] == ["a", "b"], "c is not loaded, as nobody needs it"
    request = children["b"].engine.submitted.get()
    assert (request.is_background, request.client) == (True, "key-1 in the background")
    assert [one.id for one in sdk.batches.list()] == [batch.id]


@pytest.mark.plugin("batches")
def test_line_whose_process_ends_is_sent_again(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    http, children = running("a")
    sdk = children.sdk_of(http)
    assert http.get("/v1/models/a").json()["is_loaded"] is False
    assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
    first = children["a"]
    first.engine.script = lambda request: ()
    batch = begin(sdk, line(1, model="a"))
    children.place.world.wait_for(lambda: first.engine.submitted.qsize() == 2)
    first.crash()
    batch = ended(sdk, batch)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    assert children["a"] is not first


@pytest.mark.plugin("batches")
def test_refused_line_is_charged_only_while_another_client_has_a_request(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oaiserve.plugins.batches.refused_lines import RefusedLines

    charged_ns: list[int] = []
    monkeypatch.setattr(RefusedLines, "refuse", lambda _, owner, cpu_ns, before_ns: charged_ns.append(cpu_ns))
    http, children = running("a")
    sdk = children.sdk_of(http)
    wrong = [line(number, model="a", temperature=-3) for number in range(8)]
    assert ended(sdk, begin(sdk, *wrong)).request_counts.failed == 8
    assert charged_ns == [], "the other lines of a batch are no other client's"
    children["a"].engine.script = starts("One")
    with http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}) as stream:
        parts = stream.iter_bytes()  # Without this name, the stream would end with its first part.
        assert b"One" in next(parts)
        ended(sdk, begin(sdk, wrong[0]))
    assert len(charged_ns) == 1
    assert charged_ns[0] >= RECORDED_NS, "its process says what it took"


def test_metrics_of_all_models_come_although_one_process_hangs(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    http, children = running("ab")
    for model in "ab":
        assert http.post("/v1/completions", json={"model": model, "prompt": "Hi"}).status_code == 200
    with children["a"].server.hanging():
        text = http.get("/metrics").text
    assert 'oaiserve_model_loaded{served_model="a"} 1' in text
    assert [model for model in "ab" if f'up{{served_model="{model}"}} 1' in text] == ["b"]


def test_refusal_of_a_process_is_held_back_once_and_charged_to_the_client(
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
    assert not any(name.startswith("x-oaiserve-refusal") for name in answer.headers)
    assert "oaiserve_gateway_refusal_delay_seconds_total 0.001" in http.get("/metrics").text
    ((client, cpu_ns),) = charges
    assert client == b"127.0.0.1"
    assert cpu_ns >= RECORDED_NS


def test_nobody_is_advised_to_trust_the_gateway_for_streams_of_a_process(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("oaiserve.routes.door.accounting.ids_of", lambda text: None)
    http, _ = running("a")
    answer = http.post("/v1/completions", json={"prompt": "Hi", "stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "--trusted-proxy" not in caplog.text


def test_gateway_that_never_starts_leaves_no_folder(tmp_path: Path) -> None:
    code = (
        "from oaiserve.plugins.gateway.app import *\n"
        "create_gateway_of_models(Config('models'), {'demo': Config('demo')})"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=True)
    assert [*tmp_path.iterdir()] == []


def test_adapter_is_loaded_into_the_model_that_the_query_names(
    running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    http, children = running("ab")
    assert http.get("/tokenizer_info?model=b").status_code == 200
    assert [*children] == ["b"]
    assert http.get("/tokenizer_info?model=c").json()["error"]["code"] == "model_not_found"


def test_public_gateway_without_keys_lets_nobody_change_adapters(
    running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_model_whose_process_hangs_is_a_503_until_it_answers_again(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    http, children = running("ab")

    def asked(model: str, path: str = "/v1/completions") -> httpx.Response:
        body = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
        return http.post(path, json={"model": model, "max_tokens": 2, **body})

    assert [asked(model).status_code for model in "ab"] == [200, 200]
    with children["a"].server.hanging():
        in_flight = asked("a")
        assert (in_flight.status_code, in_flight.headers["retry-after"]) == (503, "30")
        assert "'a' does not respond" in in_flight.json()["error"]["message"]
        refused = asked("a", "/v1/messages")
        assert (refused.status_code, refused.json()["type"]) == (503, "error")
        assert asked("b").status_code == 200
        ready = http.get("/ready")
        assert (ready.status_code, "'a' does not respond" in ready.text) == (503, True)
        assert 'oaiserve_gateway_replica_up{replica="1"} 0.0' in http.get("/metrics").text
    children.place.world.settle(USUAL.report_seconds + 1)
    assert http.get("/ready").status_code == 200
    assert asked("a").status_code == 200
