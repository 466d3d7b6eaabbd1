"""The real servers around scripted engines that tests of routes ask."""

from tests.serving import serve, serve_session, served  # noqa: F401 - fixtures
