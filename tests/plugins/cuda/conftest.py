"""The small model that tests of the engine have, too."""

from tests.engine.conftest import loaded

__all__ = ["loaded"]
