"""The servers around scripted engines, and a small model, that tests of plug-ins share."""

from tests.e2e.live import small_model  # noqa: F401 - fixtures
from tests.serving import serve, serve_session, served  # noqa: F401
