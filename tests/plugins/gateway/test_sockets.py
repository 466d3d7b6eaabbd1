"""Tests sockets of clients, whose responses the gateway sends to its replicas."""

from oaiserve.plugins.responses.socket_frames import CloseCode, Opcode
from tests.plugins.gateway.doubles import fleet
from tests.plugins.responses.web_socket import WebSocket, masked
from tests.world.serving import Place


def test_a_socket_through_a_gateway_moves_between_its_replicas(place: Place) -> None:
    with fleet(place, 2) as running, WebSocket(running) as client:
        client.create(max_output_tokens=4, store=False)
        first = client.response()
        client.create(max_output_tokens=4, store=False, input="More", previous_response_id=first["id"])
        second = client.response()
        assert (first["status"], second["previous_response_id"]) == ("incomplete", first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 4
        client.create(model="nope")
        assert client.event()["status"] == 404


def test_a_socket_through_a_gateway_ends_with_its_replica(place: Place) -> None:
    with fleet(place, 1, gated=True, continues="never") as running, WebSocket(running) as client:
        client.create(max_output_tokens=40)
        (replica,) = running.begun()
        replica.runner.permit(3)
        client.until("response.output_text.delta")
        replica.server.kill()
        assert client.until("error")[-1]["error"]["type"] == "server_error"
        client.send_raw(masked(Opcode.CLOSE, b""))
        assert client.closed()[0] == CloseCode.NORMAL
