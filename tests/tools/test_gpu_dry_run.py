"""The fake GPU of the dry run: models start on it with kernels and graphs, and what they launch is compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheels for this system")

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).parents[2]
END = "end of an answer"
# In a process of its own, because Triton is in interpreter mode in that of the tests.
START = """
import json

import torch
from transformers import LlamaConfig

from oaiserve.plugins.cuda.executor import triton_attention as attention
from tests.models.decoders import SMALL
from tools.engine_load import greedy, random_prompts
from tools.gpu import dry_run, workload
from tools.gpu.fake_device import FAKE, fake_device
from tools.gpu.models import described_on
from tools.gpu.sections import Target


def launched(head_dim, **settings):
    config = LlamaConfig(**SMALL | {"head_dim": head_dim})
    with fake_device() as launches:
        model = described_on(config, FAKE)
        with workload.running_engine(model, Target(FAKE, False), max_running=4, kv_blocks=64, **settings) as engine:
            answers = workload.ids(engine, random_prompts(4, 20, 90), greedy(6))
            print(json.dumps([len(answers), *set(map(len, answers))]))
            on = [name for name in ("kernels", "graphs") if not engine.features[name]]
    print(json.dumps([on, workload.OFF]))
    return launches.counts
"""


# The tile that heads of 512 had, and one that fits, by their rows.
DO_FIT = {128: False, 32: True}
_TILE = "attention.prefill_tile = lambda *sizes: attention.Tile(rows, 32, num_warps=8, num_stages=2)"
_CHOSEN = "{one: ['a section'] for one in launched(512) if one.kernel == 'prefill_kernel'}"
QUESTIONS = (
    "print(sorted({one.kernel for one in launched(16)}))",
    *(f"rows = {rows}; {_TILE}; print(dry_run.check_kernels({_CHOSEN}))" for rows in DO_FIT),
)


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """Ask all questions in one process: importing torch and transformers takes longer than most answers."""
    code = f"print({END!r})\n".join(f"{question}\n" for question in QUESTIONS)
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    # Processes that compile would run a script again, up to its imports of torch and transformers.
    command = [sys.executable, "-c", f"{START}\n\n{code}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(f"{END}\n")


def test_a_model_starts_and_answers_with_kernels_and_graphs(answers: list[str]) -> None:
    sizes, features, kernels = answers[0].splitlines()
    assert sizes == "[4, 6]"
    assert features == '[["kernels", "graphs"], {}]'
    for name in ("prefill_kernel", "decode_kernel", "add_and_norm_kernel", "candidates_kernel"):
        assert name in kernels


@pytest.mark.parametrize("rows", DO_FIT)
def test_a_kernel_that_needs_too_much_shared_memory_is_found(rows: int, answers: list[str]) -> None:
    said = answers[1 + [*DO_FIT].index(rows)].rstrip("\n")
    does_fit = DO_FIT[rows]
    assert said.endswith(f"\n{does_fit}")
    problems = [line for line in said.splitlines() if line.startswith("prefill_kernel")]
    assert bool(problems) != does_fit
    for problem in problems:
        assert "KEY_DIM 512" in problem
        assert "needs 262,144 bytes of shared memory, and a program has at most 232,448" in problem
        assert problem.endswith("Launched by a section.")
