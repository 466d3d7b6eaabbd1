"""What one API key learns of another: the table "Between keys" in docs/security.md, row by row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from tests.engine.doubles import ScriptedRunner, make_engine
from tests.routes.asking import BODIES, CHAT, COMPLETIONS, RESPONSES, bearer
from tests.routes.doubles import FakeTelemetry
from tests.serving import Serve
from tests.world.serving import Place

ONE = bearer("one")
TWO = bearer("two")
LONG = "A prompt of several blocks, which both keys send. " * 4


@pytest.mark.parametrize(
    ("options", "path", "is_shared"),
    [
        *(({"api_key": ("one", "two")}, path, False) for path in BODIES),
        ({"api_key": ("one", "two"), "share_prefix_cache": True}, COMPLETIONS, True),
    ],
)
def test_another_key_finds_no_tokens_of_a_prompt_in_the_prefix_cache(
    place: Place, options: dict[str, Any], path: str, is_shared: bool
) -> None:
    field = next(name for name in ("prompt", "messages", "input") if name in BODIES[path])
    prompt: Any = [{"role": "user", "content": LONG}] if field == "messages" else LONG
    app = create_app(
        Config("m", ServerOptions(**options)),
        make_engine(ScriptedRunner(), kv_blocks=512, runtime=place.world),
        FakeTelemetry(place.world),
        runtime=place.world,
    )
    with place.running(app) as url, place.client_of(url) as http:

        def num_cached(key: dict[str, str]) -> int:
            body = BODIES[path] | {field: prompt, "max_tokens" if path != RESPONSES else "max_output_tokens": 1}
            usage = http.post(path, json=body | ({"model": "m"} if "model" in body else {}), headers=key).json()[
                "usage"
            ]
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            return int(details.get("cached_tokens", usage.get("cache_read_input_tokens", 0)))

        assert num_cached(ONE) == 0
        assert (num_cached(TWO) > 0) == is_shared
        assert num_cached(ONE) > 0


@dataclass
class Stored:
    """Something that a key has stored: how it is made, and the requests that name it."""

    make: Callable[[httpx.Client], str]
    listed: str  # "": there is no list
    asked: tuple[tuple[str, str], ...]
    body: dict[str, Any] | None = None


def upload(http: httpx.Client, content: bytes = b"{}") -> str:
    form = {"files": {"file": content}, "data": {"purpose": "user_data"}}
    return str(http.post("/v1/files", headers=ONE, **form).json()["id"])


def made(path: str, **body: Any) -> Callable[[httpx.Client], str]:
    return lambda http: str(http.post(path, json=body, headers=ONE).json()["id"])


def batch(http: httpx.Client) -> str:
    fields = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": upload(http, b"not a line")}
    return str(http.post("/v1/batches", json=fields, headers=ONE).json()["id"])


ITEMS = [{"role": "user", "content": "Hi"}]
KEPT = {
    "response": Stored(
        made(RESPONSES, input="Hi"),
        "",
        (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("GET", "?stream=true")),
    ),
    "response in the background": Stored(
        made(RESPONSES, input="Hi", background=True), "", (("GET", ""), ("POST", "/cancel"), ("GET", "?stream=true"))
    ),
    "conversation": Stored(
        made("/v1/conversations", items=ITEMS),
        "",
        (("GET", ""), ("POST", ""), ("DELETE", ""), ("GET", "/items"), ("POST", "/items"), ("GET", "/items/msg_1")),
        {"items": ITEMS, "metadata": {}},
    ),
    "file": Stored(upload, "/v1/files", (("GET", ""), ("DELETE", ""), ("GET", "/content"))),
    "batch": Stored(batch, "/v1/batches", (("GET", ""), ("POST", "/cancel"))),
}
FOLDERS = {"file": "/v1/files", "batch": "/v1/batches", "conversation": "/v1/conversations"}


@pytest.mark.parametrize(("kind", "folder"), [(kind, FOLDERS.get(kind, RESPONSES)) for kind in KEPT])
def test_what_a_key_has_stored_is_for_another_as_if_it_were_not_there(serve: Serve, kind: str, folder: str) -> None:
    served = serve(api_key=("one", "two"))
    stored = KEPT[kind]
    name = stored.make(served.http)
    unknown = name[:-1] + ("0" if name[-1] != "0" else "1")
    for method, rest in stored.asked:

        def ask(which: str, method: str = method, rest: str = rest) -> tuple[int, str]:
            body = None if stored.body is None or method != "POST" else stored.body
            answer = served.http.request(method, f"{folder}/{which}{rest}", json=body, headers=TWO)
            return answer.status_code, answer.json()["error"]["message"].replace(which, "ID")

        assert ask(name) == ask(unknown)
        assert ask(name)[0] == 404
    if stored.listed:
        assert served.http.get(stored.listed, headers=TWO).json()["data"] == []
    assert served.http.get(f"{folder}/{name}", headers=ONE).status_code == 200


@pytest.mark.plugin("batches", "responses")
def test_a_request_cannot_name_what_another_key_has_stored(serve: Serve) -> None:
    served = serve(api_key=("one", "two"))
    response = served.http.post(RESPONSES, json={"input": "Hi"}, headers=ONE).json()
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}
    batch = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": upload(served.http)}
    for path, body, refused in (
        (RESPONSES, {"input": "Hi", "previous_response_id": response["id"]}, 400),
        (RESPONSES, {"input": [reference]}, 400),
        (RESPONSES, {"input": "Hi", "conversation": made("/v1/conversations", items=ITEMS)(served.http)}, 404),
        ("/v1/batches", batch, 404),
    ):
        statuses = [served.http.post(path, json=body, headers=key).status_code for key in (TWO, ONE)]
        assert statuses == [refused, 200]
