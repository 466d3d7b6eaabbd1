"""The checks of answers on a CPU, with doubles of kernels: each finds a fault that is put in."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.config import EngineOptions
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.request import Request, SamplingParams
from oaiserve.engine.sequences.blocks import BlockPool
from oaiserve.engine.sequences.step import Step, StepResult
from tests.engine.doubles import new_world
from tests.models.decoders import real_shape
from tests.plugins.cuda.executor.step_runs import padded_attention
from tests.plugins.cuda.start import ready
from tools.engine_load import random_prompts
from tools.gpu import answers, probes, schedule
from tools.gpu.fake_device import FAKE
from tools.gpu.models import described_on
from tools.gpu.requests import some_requests
from tools.gpu.sections import Target
from tools.gpu.side_by_side import NO_NUMBERS
from tools.gpu.ties import NEAR_TIE, compare, rounding, tie_distance
from tools.gpu.workload import started

# Rows without numbers are computed like the others, and then marked.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")]

CPU = Target(torch.device("cpu"), quick=True, runtime=new_world())
LLAMA = "two layers of Llama 3.2 1B, float32"


def with_mixed_steps_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention be wrong by a tenth in steps in which others decode beside a prompt."""

    def attention(batch: Batch) -> Callable[..., torch.Tensor]:
        attend = padded_attention(batch)
        is_mixed = batch.decode_slots is not None or 0 < batch.num_decodes < len(batch.query_lens)
        return lambda *given: attend(*given) * (1.1 if is_mixed else 1.0)

    monkeypatch.setattr(ready, "padded_attention", attention)


def with_a_shorter_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decodes not see the first key."""

    def attention(batch: Batch) -> Callable[..., torch.Tensor]:
        return padded_attention(replace(batch, block_tables=batch.block_tables.flip(1)))

    monkeypatch.setattr(ready, "padded_attention", attention)


@pytest.mark.parametrize("name", ["Llama, AWQ", "Bamba, with states"])
def test_a_probe_finds_wrong_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.check(CPU, name) == {"equal": True}
    with_a_shorter_context(monkeypatch)
    found = probes.check(CPU, name)
    assert not found["equal"]
    assert "the outputs would differ by" in found["problem"]


def test_a_probe_that_raises_has_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("too much shared memory")

    monkeypatch.setattr(ready, "padded_attention", refused)
    found = probes.check(CPU, "Gemma 2")
    assert (found["equal"], found["problem"]) == (False, "RuntimeError: too much shared memory")
    assert "refused" in "".join(found["log"])


def test_probes_have_every_kind_of_head_group_cache_weight_and_state() -> None:
    heads = set[int]()
    groups = set[int]()
    for case in probes.CASES.values():
        model = described_on(case.config(is_small=False), FAKE, packing=case.packing)
        for layer in model.decoder.layers:
            if layer.attention is not None:
                heads.add(layer.attention.shape.key_dim)
                groups.add(layer.attention.heads // layer.attention.shape.kv_heads)
    assert {64, 80, 96, 128, 192, 256, 512} <= heads
    assert {1, 4, 8, 71} <= groups
    packings = [case.packing for case in probes.CASES.values()]
    assert {"fp8", "mxfp4"} <= {packing for packing in packings if isinstance(packing, str)}
    options = [case.engine_options("bfloat16") for case in probes.CASES.values()]
    assert any(one.has_adapters for one in options)
    assert any(one.kv_cache_dtype == "fp8" for one in options)


@pytest.mark.parametrize("name", ["llama", "GPTQ in any order"])
def test_a_family_is_compared_with_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MODES", [answers.MODES[0], answers.MODES[-1]])
    assert answers.check_family(CPU, name)["equal"]
    with_mixed_steps_scaled(monkeypatch)
    found = answers.check_family(CPU, name)
    assert not found["equal"]
    assert found["different"][0] == "greedy, {}"


def test_every_family_has_a_model() -> None:
    names = answers.names_of(Target(FAKE, quick=False))
    assert len(names) > 80
    assert {*answers.OWN_LAYERS, *answers.PACKED} <= {*names}


def test_modes_of_a_real_shape_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MODES", [answers.MODES[0], answers.MODES[-1]])
    assert answers.check_shape(CPU, "gpt2-124m, float32")["equal"]
    with_a_shorter_context(monkeypatch)
    found = answers.check_shape(CPU, "gpt2-124m, bfloat16")
    assert not found["equal"]
    assert not all(one["is_near_tie"] for one in found["different"])


def test_answers_may_differ_only_from_a_tie_on() -> None:
    model = described_on(real_shape("smollm2-135m", tiny=True), CPU.device, dtype=torch.float32)
    options = EngineOptions(compile=False, kv_blocks=8)
    runner = started(model, options).runner
    prompt = random_prompts(1, 12, model.spec.vocab_size)[0]
    distances = [tie_distance(runner, 16, prompt, token, token) for token in range(model.spec.vocab_size)]
    best = distances.index(min(distances))
    worst = distances.index(max(distances))
    assert tie_distance(runner, 16, prompt, best, best) == 0
    (difference,) = compare(runner, 16, [prompt], [[best, 1, 2]], [[worst, 1, 2]])
    assert difference["token"] == 0
    assert not difference["is_near_tie"]
    assert difference["limit"] == NEAR_TIE
    assert not list(compare(runner, 16, [prompt], [[best, 1]], [[best, 1]]))
    (shorter,) = compare(runner, 16, [prompt], [[best, 1]], [[best]])
    assert not shorter["is_near_tie"]


class RunnerOffByRounding:
    """Returns other logits for a token in a step of its own."""

    def launch(self, step: Step) -> SimpleNamespace:
        (chunk,) = step.chunks
        own_step = chunk.start > 0
        return SimpleNamespace(logits=torch.tensor([[1.0, 0.875 + 0.25 * own_step, -5.0, 5.0]]))

    def collect(self, launched: SimpleNamespace) -> None:
        pass


def test_tokens_tie_if_rounding_moves_their_logits_as_far() -> None:
    runner: Any = RunnerOffByRounding()
    expected = 0.25 / float(torch.tensor([1.0, 0.875, -5.0, 5.0]).std())

    assert rounding(runner, 16, [1, 2, 3]) == pytest.approx(expected)


@pytest.mark.parametrize("name", schedule.CASES)
def test_a_schedule_gives_the_answers_of_plain_torch(name: str) -> None:
    found = schedule.check(CPU, name)
    assert found["equal"], found
    assert found["fast"]["preemptions"] > 0
    assert found["fast"]["mixed"] > 10


def test_a_schedule_finds_wrong_attention_of_mixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with_mixed_steps_scaled(monkeypatch)
    found = schedule.check(CPU, LLAMA)
    assert not found["equal"]
    assert found["wrong"] > 0


def test_a_schedule_finds_draws_with_the_seed_of_another_position(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherSeeds(ready.PlainSampler):
        def draw(
            self, logits: torch.Tensor, parameters: torch.Tensor, seeds: torch.Tensor, out: Any, edits: Any = None
        ) -> None:
            super().draw(logits, parameters, seeds + 1, out, edits)

    def that_draw(*args: Any, **kwargs: Any) -> list[Request]:
        """Let all tokens be drawn by the sampler: how many steps have no edits beside them depends on time."""
        return [
            replace(one, params=SamplingParams(seed=one.params.seed, max_tokens=8))
            for one in some_requests(*args, **kwargs)
        ]

    monkeypatch.setattr(schedule, "some_requests", that_draw)
    assert schedule.check(CPU, LLAMA)["equal"]
    monkeypatch.setattr(ready, "PlainSampler", OtherSeeds)
    assert schedule.check(CPU, LLAMA)["wrong"] > 0


def test_a_schedule_finds_a_block_that_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    kept: list[int] = []

    def released(pool: BlockPool, blocks: Any, *, first: bool = False) -> float:
        if not kept and len(blocks) > 2:
            kept.append(blocks[-1])
            blocks = blocks[:-1]
        return release(pool, blocks, first=first)

    monkeypatch.setattr(BlockPool, "release", released)
    found = schedule.check(CPU, LLAMA)
    assert not found["equal"]
    assert "1 blocks are left" in found["problems"]


def test_a_schedule_without_preemptions_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = schedule.TINY._replace(settings=schedule.TINY.settings | {"kv_blocks": 400})
    monkeypatch.setattr(schedule, "TINY", roomy)
    found = schedule.check(CPU, LLAMA)
    assert not found["equal"]
    assert found["problems"] == ["0 preemptions, less than 1"]


def test_a_request_that_fails_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = ModelRunner.collect

    def collected(runner: ModelRunner, launched: Any) -> StepResult:
        results = collect(runner, launched)
        step: Step = launched.step
        for chunk, result in zip(step.chunks, results.chunks, strict=True):
            if chunk.sequence.request_id == "r3":
                result.error = "NaN"
        return results

    monkeypatch.setattr(ModelRunner, "collect", collected)
    found = schedule.check(CPU, LLAMA)
    assert not found["equal"]
    assert any(problem.startswith("r3: NaN") for problem in found["problems"])


# In a process of its own, because Triton is in interpreter mode in that of the tests.
ON_THE_FAKE_DEVICE = """
import json

from tools.gpu import answers, probes, schedule
from tools.gpu.fake_device import FAKE, fake_device
from tools.gpu.sections import Target

for check, name in (
    (probes.check, "Gemma 2"),
    (answers.check_family, "qwen3"),
    (answers.check_shape, "gpt2-124m, float32"),
    (schedule.check, "two layers of Llama 3.2 1B, float32"),
):
    with fake_device() as launches:
        print(json.dumps([check(Target(FAKE, quick=True), name), len(launches.counts)]))
"""


def test_nothing_is_equal_on_the_fake_device() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_FAKE_DEVICE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        found, num_variants = json.loads(line)
        assert found["problem"] == NO_NUMBERS
        assert "equal" not in found
        assert num_variants > 5
    assert len(done.stdout.splitlines()) == 4
