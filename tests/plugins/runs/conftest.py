"""The browser that tests of the pages share."""

from tests.e2e.browser import browser, open_page, shared_context  # noqa: F401 - fixtures
