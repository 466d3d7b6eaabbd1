"""For the engine's tests."""

from __future__ import annotations

import pytest

from tests.engine.doubles import ScriptedRunner


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Twice: each step is waited for before the next is scheduled, and with one step under way."""
    monkeypatch.setattr(ScriptedRunner, "is_asynchronous", request.param)
    return request.param  # type: ignore[no-any-return]
