"""Requests that clients really send, in examples.jsonl, each with what is right in the answer of the demo model.

A line has the `status`, and what else counts: fields of the `answer` by their paths, words of the `error` or of what
was `adapted`, the schema of the `content`, how many `pieces` of a kind a stream has, and attributes of the `span`.
`BEFORE` in a body is the id of the answer to the same request with other parameters, and `UPLOADED` that of a file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from jsonschema import Draft202012Validator
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from oaiserve.routes.adaptations import HEADER
from tests.e2e.live import serve_process
from tests.telemetry.collector import Collector, running_collector
from tests.waiting import wait_until

EXAMPLES = [json.loads(line) for line in Path(__file__).with_name("examples.jsonl").read_text().splitlines()]


class Traced(NamedTuple):
    http: httpx.Client
    collector: Collector


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """Serve the demo model, with spans that leave at once."""
    log_file = tmp_path_factory.mktemp("examples") / "log"
    with running_collector() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "1", "NO_PROXY": "127.0.0.1"}
        with (
            serve_process("demo", log_file, "--kv-cache-memory", "512MiB", env=env) as server,
            httpx.Client(base_url=server.url, timeout=120) as http,
        ):
            yield Traced(http, collector)


def post(demo: Traced, route: str, body: Any) -> httpx.Response:
    # Python's JSON has escapes, also for half an emoji.
    return demo.http.post(route, content=json.dumps(body), headers={"content-type": "application/json"})


def send(demo: Traced, route: str, example: dict[str, Any]) -> httpx.Response:
    """Send a request, and before it what it refers to."""
    body = json.dumps(example["body"])
    if "before" in example:
        before = post(demo, route, json.loads(body) | example["before"])
        body = body.replace("BEFORE", before.json()["id"])
    if "upload" in example:
        file = {"file": ("notes.txt", example["upload"].encode()), "purpose": (None, "user_data")}
        body = body.replace("UPLOADED", demo.http.post("/v1/files", files=file).json()["id"])
    return post(demo, route, json.loads(body))


def field(value: Any, path: str) -> Any:
    for step in path.split("."):
        value = value[int(step) if isinstance(value, list) else step]
    return value


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def span_of(demo: Traced, request_id: str) -> dict[str, Any]:
    """Return the attributes of the span for the operation of a request, once the server has sent it."""
    found: list[dict[str, Any]] = []

    def arrived() -> bool:
        spans = [{each.key: plain(each.value) for each in span.attributes} for span in demo.collector.spans]
        found[:] = [
            span for span in spans if span.get("oaiserve.request.id") == request_id and "gen_ai.operation.name" in span
        ]
        return bool(found)

    wait_until(arrived)
    return found[0]


@pytest.mark.parametrize(
    ("route", "example"),
    [
        pytest.param(each["route"], each, id=each["name"], marks=pytest.mark.plugin(*each.get("plugins", ())))
        for each in EXAMPLES
    ],
)
def test_a_request_gets_the_right_answer(demo: Traced, route: str, example: dict[str, Any]) -> None:
    answer = send(demo, route, example)
    assert answer.status_code == example["status"], answer.text
    assert example.get("adapted", "") in answer.headers.get(HEADER, "")
    for path, right in example.get("answer", {}).items():
        value = field(answer.json(), path)
        if isinstance(right, dict) and "at_least" in right:
            assert value >= right["at_least"], path
        else:
            assert value == right, path
    if "error" in example:
        assert example["error"] in answer.json()["error"]["message"]
    if "content" in example:
        content = json.loads(field(answer.json(), "choices.0.message.content"))
        Draft202012Validator(example["content"]).validate(content)
    for kind, number in example.get("pieces", {}).items():
        assert answer.text.count(f'"type":"{kind}"') >= number
    if "span" in example:
        span = span_of(demo, answer.headers["x-request-id"])
        assert {name: span.get(name) for name in example["span"]} == example["span"]
