"""Fixtures of the models' tests."""

from __future__ import annotations

import pytest

from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.prepare import prepare
from tests.models.decoders import FAMILIES, random_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """Return a small random Llama, ready to be computed in steps."""
    return prepare(random_model(FAMILIES["llama"]))
