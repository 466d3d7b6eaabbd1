"""On a CPU, the way to start on a GPU declines, and costs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.start.request import StartRequest
from oaiserve.errors import StartupError
from oaiserve.plugins.cuda.way import OnGpu
from tests.engine.doubles import new_world
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.remembered import save

ROOT = Path(__file__).parents[3]

# Starts a model as a server does, and prints the modules of the plug-in that this has imported.
START = """
import sys
from oaiserve.config import EngineOptions
from oaiserve.plugin_loading import own_plugins
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.run_engine import load_engine
load_engine(sys.argv[1], EngineOptions(device="auto", compile=False, kv_blocks=16), StartTimes(), own_plugins())
print(*sorted(name for name in sys.modules if name.startswith(("oaiserve.plugins.cuda", "triton"))))
"""


def request(**options: object) -> StartRequest:
    return StartRequest(None, EngineOptions(**options), new_world())  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device": "auto"}], ids=str)
def test_it_declines_on_a_cpu(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert OnGpu().accepts(request(**options)) == "its device is the CPU"


def test_it_declines_other_tasks_and_refuses_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = request(device="cuda")
    with pytest.raises(StartupError, match="^--device cuda: torch sees no CUDA device here; "):
        OnGpu().accepts(asked)
    asked.task = "embed"
    assert OnGpu().accepts(asked) == "it is for --task embed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, and --device auto selects it")
def test_a_start_on_a_cpu_imports_no_more_of_the_plugin_than_its_way(tmp_path: Path) -> None:
    save(make_model(FAMILIES["llama"]), tmp_path)
    done = subprocess.run([sys.executable, "-c", START, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["oaiserve.plugins.cuda", "oaiserve.plugins.cuda.way"]
