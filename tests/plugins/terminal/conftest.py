from tests.commands.conftest import cache, server  # noqa: F401 - fixtures
