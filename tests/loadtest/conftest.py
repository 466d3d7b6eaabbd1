"""Fixtures that these tests share with others."""

from tests.certificates import certificates
from tests.e2e.browser import browser, open_page, shared_context

__all__ = ["browser", "certificates", "open_page", "shared_context"]
