"""Responses in the background through a gateway, whose replica ends and comes back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI
from openai.types.responses import Response

from oaiserve.plugins.gateway.address import Address
from oaiserve.plugins.gateway.app import create_gateway
from oaiserve.plugins.gateway.options import RouteOptions
from oaiserve.plugins.responses import resumption
from oaiserve.plugins.shared.store_options import StoreOptions
from tests.e2e.live import API_KEY, LiveServer, serve_process
from tests.plugins.gateway.doubles import OPTIONS, QUICK, fleet
from tests.routes.asking import RESPONSES, answered, refused
from tests.serving import RunningServer
from tests.waiting import wait_until
from tests.world.serving import Place


def test_response_is_found_through_the_gateway_once_its_replica_is_back(place: Place, tmp_path: Path) -> None:
    store = (StoreOptions(response_store=tmp_path / "responses.db"),)
    with fleet(place, 1, gated=True, of_plugins=store) as running:
        body = {"input": "Hi", "background": True, "max_output_tokens": 4}
        response_id = answered(running.http.post(RESPONSES, json=body))["id"]
        (replica,) = running.replicas.values()
        replica.server.kill()
        replica.app.state.responses.background.claim.close()  # as the system does with the lock of a killed process
        refused(running.http.get(f"{RESPONSES}/{response_id}"), None, "No replica can be reached", status=503)
        running.named.clear()
        running.add()
        running.wait_until_known()
        place.world.settle(2 * resumption.LOOK_SECONDS)
        assert answered(running.http.get(f"{RESPONSES}/{response_id}"))["status"] == "incomplete"
        with running.http.stream("GET", f"{RESPONSES}/{response_id}?stream=true&starting_after=3") as stream:
            assert "response.incomplete" in stream.read().decode()
        replica.runner.permit(100)


def test_response_is_not_said_to_be_missing_while_a_replica_does_not_answer(place: Place) -> None:
    with fleet(place, 2) as running:
        response_id = answered(running.http.post(RESPONSES, json={"input": "Hi", "max_output_tokens": 2}))["id"]
        for path in (response_id, "resp_unknown"):
            statuses = {running.http.get(f"{RESPONSES}/{path}").status_code for _ in range(4)}
            assert statuses == {200 if path == response_id else 404}
        replicas = [*running.replicas.values()]
        replicas[0].server.kill()
        url = f"{RESPONSES}/resp_unknown"
        refused(running.http.get(url), None, "No replica can be reached", status=503)
        running.named.remove(next(one for one in running.named if one.name == replicas[0].name))
        running.wait_for(lambda: replicas[0].name not in running.watch.upstreams)
        assert running.http.get(url).status_code == 404


# -- a process that is killed ------------------------------------------------------------------------------------------

NUM_TOKENS = 600  # The server is killed when the first of them arrives.


@contextmanager
def gateway_to(servers: list[LiveServer]) -> Iterator[OpenAI]:
    """Give a client of a gateway whose only replica is the last of these servers."""

    async def resolve(url: str) -> list[Address]:
        port = servers[-1].url.rpartition(":")[2]
        return [Address("127.0.0.1", int(port), f"127.0.0.1:{port}")]

    app, gateway = create_gateway(RouteOptions(replica=("http://replica",)), resolve, QUICK)
    with (
        RunningServer(app, OPTIONS, on_drain=gateway.drain) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY) as sdk,
    ):
        wait_until(lambda: gateway.is_ready)
        yield sdk


@contextmanager
def answering(server: LiveServer) -> Iterator[None]:
    """Let the server write a long answer, which takes its only place, until the end of the block."""
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 10_000, "ignore_eos": True, "stream": True}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())
        yield


def ended(sdk: OpenAI, name: str) -> Response:
    wait_until(lambda: sdk.responses.retrieve(name).status not in ("queued", "in_progress"))
    return sdk.responses.retrieve(name)


def test_responses_in_the_background_survive_a_kill_with_the_same_bytes(small_model: Path, tmp_path: Path) -> None:
    """The first one runs when the server is killed, the others wait. A gateway is in front.

    Another answer takes the server's only place until all three are stored. The kill follows the first token of the
    first one, however long the requests took.
    """
    flags = ("--served-model-name", "demo", "--api-key", API_KEY, "--kv-cache-memory", "2400KiB", "--max-running", "1")
    flags += ("--response-store", str(tmp_path / "responses.db"))
    asked: dict[str, Any] = {"model": "demo", "input": "Hi", "background": True, "max_output_tokens": NUM_TOKENS}
    sampled: dict[str, Any] = {"temperature": 1.0, "extra_body": {"seed": 7, "ignore_eos": True}}
    with serve_process(str(small_model), tmp_path / "first.log", *flags) as first:
        servers = [first]
        with gateway_to(servers) as sdk:
            with answering(first):
                events = sdk.responses.create(**asked | sampled, stream=True)
                created = next(events)
                assert created.type == "response.created"
                begun = [created.response, *(sdk.responses.create(**asked | sampled) for _ in range(2))]
                statuses = {sdk.responses.retrieve(one.id).status for one in begun}
                assert statuses <= {"queued", "in_progress"}  # A stream may begin before its first token.
            with events:
                assert "response.output_text.delta" in (event.type for event in events)
                first.process.kill()
            first.process.wait()
            with serve_process(str(small_model), tmp_path / "second.log", *flags) as second:
                servers.append(second)
                answers = [ended(sdk, one.id) for one in begun]
                undisturbed = ended(sdk, sdk.responses.create(**asked | sampled).id)
    assert {answer.status for answer in answers} == {"incomplete"}
    assert {answer.output_text for answer in answers} == {undisturbed.output_text}
    assert [answer.created_at for answer in answers] == [one.created_at for one in begun]
