"""The live server that these tests ask."""

from tests.e2e.live import live  # noqa: F401 - a fixture
