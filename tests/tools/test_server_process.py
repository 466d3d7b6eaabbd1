"""The ports of servers that tools and tests start."""

import socket

import pytest

from tools.server_process import free_port


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_a_free_port_is_for_a_server_and_for_nobody_who_asks_for_any(option: int) -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    for _ in range(2):  # A server that was killed is followed by another one.
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
                pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
