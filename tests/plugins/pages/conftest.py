"""The servers and the browser that these tests share."""

from tests.e2e.browser import browser, open_page, shared_context  # noqa: F401 - fixtures
from tests.e2e.live import answers_are_as_published, live  # noqa: F401
from tests.plugins.pages.chat_page import script, scripted_page, scripted_url  # noqa: F401
from tests.serving import serve, serve_session, served  # noqa: F401 - the browser has sockets
