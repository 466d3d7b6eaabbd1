"""With --cpu-features avx2, a machine with AVX-512 computes as one without it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.executors.native import build, prebuilt
from oaiserve.errors import StartupError
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.remembered import answer, save

pytestmark = pytest.mark.compiler
ROOT = Path(__file__).parents[3]
OPTIONS = {"device": "cpu", "kv_blocks": 64, "cpu_threads": 1, "cpu_features": "avx2"}
START = f"""
import sys
from pathlib import Path
import torch
from tests.engine.remembered import answer
print(answer(Path(sys.argv[1]), **{OPTIONS}), torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="this CPU has no AVX2: run it on one that has",
)
def test_the_native_step_without_avx512_is_probed_and_started_again(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limit holds at each level of optimization, and -O1 compiles in half the time.
    monkeypatch.setenv("CXX", "sh -c 'exec g++ \"$@\" -O1' sh")
    with monkeypatch.context() as patch:
        patch.setenv(prebuilt.LIMIT, "avx2")
        library = build.build(torch.float32)
    code = subprocess.run(["objdump", "--disassemble", library], capture_output=True, text=True, check=True).stdout
    assert "%ymm" in code
    assert not re.search("%zmm|%k[1-7]", code)

    folder = save(make_model(FAMILIES["llama"]), tmp_path / "model")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", START, folder]
    said = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    assert said[0].stdout == said[1].stdout
    assert said[0].stdout.endswith(" AVX2\n")
    assert any(empty_cache.glob(f"probed/{library.name}-*"))


def computed_with_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that it has used AVX-512 in this process."""
    for variable in (prebuilt.LIMIT, "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.setenv(variable, "")  # so that what a start sets is undone
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")


def test_a_process_that_has_computed_with_more_says_so(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_model(FAMILIES["llama"]), tmp_path / "model")
    computed_with_avx512(monkeypatch)
    with pytest.raises(StartupError, match="^--cpu-features avx2 cannot be had: torch uses AVX512 in this process"):
        answer(folder, **OPTIONS)


def test_a_process_is_limited_before_torch_loads_a_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make_model(FAMILIES["llama"]), tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vision_config": {"hidden_size": 8}}))
    computed_with_avx512(monkeypatch)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")

    def load_media(*_: object) -> None:
        raise StartupError(f"The limit is {os.environ[prebuilt.LIMIT]}.")

    with pytest.raises(StartupError, match="The limit is avx2"):
        Engine.from_pretrained(folder, EngineOptions(cpu_features="avx2"), load_media=load_media)
