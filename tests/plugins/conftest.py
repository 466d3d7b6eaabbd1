from tests.e2e.conftest import small_model  # noqa: F401 - a fixture
