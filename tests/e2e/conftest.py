"""The servers and the browser that these tests share."""

from tests.certificates import certificates  # noqa: F401
from tests.e2e.browser import browser, open_page, shared_context  # noqa: F401 - fixtures
from tests.e2e.live import answers_are_as_published, live, small_model  # noqa: F401
from tests.world.serving import place, place_of_module, place_session  # noqa: F401
