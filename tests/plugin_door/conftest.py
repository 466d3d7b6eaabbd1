"""A folder for the packages of a test, and a place for its servers."""

import sys
from pathlib import Path

import pytest

from tests.world.serving import place, place_session  # noqa: F401 - fixtures


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder from which Python imports, until the end of the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path
