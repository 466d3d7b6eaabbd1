"""The servers that tests of connections ask are those of tests of routes."""

from tests.certificates import certificates
from tests.serving import serve, serve_session, served

__all__ = ["certificates", "serve", "serve_session", "served"]
