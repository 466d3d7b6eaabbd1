"""Plans of tests replay few prompts."""

import pytest

from oaiserve.plan import search


@pytest.fixture(autouse=True)
def short_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LEAST_PROMPTS", 100)
    monkeypatch.setattr(search, "MOST_PROMPTS", 200)
