"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from tests.engine.doubles import ScriptedRunner


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test twice: with each step collected before the next is scheduled, and with one step in flight."""
    monkeypatch.setattr(ScriptedRunner, "is_asynchronous", request.param)
    return request.param  # type: ignore[no-any-return]
