"""Which models the plug-in starts."""

from pathlib import Path

import pytest

from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.remembered import save
from tests.plugins.pooling.model.started import started


@pytest.mark.compiler
def test_a_text_model_embeds_with_that_task(tmp_path: Path) -> None:
    save(make_model(FAMILIES["llama"]), tmp_path)
    with started(tmp_path, device="cpu", cpu_threads=1, task="embed") as engine:
        assert engine.pooling is not None
        assert engine.pooling.task == "embed"
