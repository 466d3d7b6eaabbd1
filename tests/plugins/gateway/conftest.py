"""The live server that these tests ask."""

from tests.e2e.browser import browser, open_page, shared_context  # noqa: F401 - fixtures
from tests.e2e.live import live  # noqa: F401
