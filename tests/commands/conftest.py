"""A cache of its own for each test, and a server whose model repeats what it is told."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.scripted import ScriptedServer, scripted_server
from tests.checkpoints.test_hub import hub  # noqa: F401 - a fixture
from tests.routes.doubles import FakeTelemetry

METRICS = b"""# HELP oaiserve_requests_running Sequences that take part in steps of the engine.
oaiserve_requests_running 2.0
oaiserve_requests_waiting 1.0
process_resident_memory_bytes 1.364e+09
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "ours"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "ours"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTelemetry, "render", lambda self, accept, names_clients: (METRICS, "text/plain"))
        with scripted_server(answer) as server:
            yield server


def answer(prompt: str) -> str:
    """Return the last user's text, and how many have spoken before."""
    *before, last = prompt.split("<|im_start|>user\n")
    return f"You said **{last.partition('<|im_end|>')[0]}** after {len(before) - 1}."
