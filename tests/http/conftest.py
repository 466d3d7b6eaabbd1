"""The servers that tests of connections ask are those of tests of routes."""

from tests.routes.conftest import serve, serve_session, served

__all__ = ["serve", "serve_session", "served"]
