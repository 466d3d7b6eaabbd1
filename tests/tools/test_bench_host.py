"""The tool that measures what streams cost gives the server of its own command a runner that computes nothing."""

from pathlib import Path

import pytest

from oaiserve.engine import engine
from tests.engine.remembered import OPTIONS, answer, save
from tests.models.decoders import FAMILIES, random_model
from tools.bench import host


def test_a_started_model_draws_the_ids_of_the_instant_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = FAMILIES["llama"]
    folder = save(random_model(config), tmp_path / "model", config.vocab_size)
    answers: list[list[list[int]]] = []
    monkeypatch.setattr(engine, "start_model", engine.start_model)  # which the command replaces
    monkeypatch.setattr(host, "serve", lambda _: answers.append(answer(folder, **OPTIONS)))
    monkeypatch.setattr(host, "NUM_IDS", 50)

    host.main(["serve", "demo"])

    ((ids,),) = answers
    assert ids == [50 + (4 + place) % 50 for place in range(len(ids))]
