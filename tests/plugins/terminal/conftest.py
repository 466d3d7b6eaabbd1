"""The servers that tests of commands ask, which have sockets."""

from tests.commands.conftest import cache, server
from tests.serving import serve, serve_session, served

__all__ = ["cache", "serve", "serve_session", "served", "server"]
