"""Dry runs of the sections of the GPU check: the same code with tiny models on a CPU."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.config import EngineOptions
from tests.models.decoders import random_model, real_shape
from tools import gpu_check
from tools.engine_load import random_prompts
from tools.gpu import answers, engines, kernels, overload, packed, steps, waits
from tools.gpu.sections import NOT_ON_CPU, Target
from tools.gpu.workload import files_of, started

# Rows without numbers are computed like the others, and then marked.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")]

DEVICE = torch.device("cpu")
CPU = Target(DEVICE, quick=True)


def found_by(parts: Any) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def test_the_check_runs_one_section_writes_its_results_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = gpu_check.main(["--out", str(tmp_path), "--device", "cpu", "--quick", "--only", "environment"])
    assert code == 0
    result = json.loads((tmp_path / "gpu_check.json").read_text())["sections"]["environment"]
    assert (result["status"], result["ceilings"]) == ("done", NOT_ON_CPU)
    assert result["versions"]["torch"] == torch.__version__
    assert (tmp_path / "gpu_check.md").read_text() == capsys.readouterr().out.removesuffix("\n")
    assert (tmp_path / "environment.log").exists()
    again = ["--out", str(tmp_path), "--device", "cpu", "--quick", "--only", "environment", "--resume"]
    monkeypatch.setattr(gpu_check, "run_all", lambda chosen, *_: pytest.fail(chosen) if chosen else iter(()))
    assert gpu_check.main(again) == 0
    assert "| environment | done |" in capsys.readouterr().out


def test_answers_are_the_same_under_preemption_and_aborts() -> None:
    found = overload.preemption(CPU)
    assert found["equal"], found
    assert found["preemptions"] > 0
    assert found["left_early"] > 0


def test_only_a_client_that_leaves_may_have_less_than_its_answer() -> None:
    expected = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert overload.wrong_answers(expected, [[1, 2, 3], [4, 5], [7, 8, 9]], leaving={1}) == []
    assert overload.wrong_answers(expected, [[1, 2], [4, 6], [7, 8, 9, 1]], leaving={1}) == [0, 1, 2]


def test_a_family_is_compared_with_generate() -> None:
    found = answers.check_family("qwen3", CPU, [{}])
    assert (found["equal"], found["tokens"], found["modes"]) == (True, 60, 1)


def test_kernels_equal_the_reference() -> None:
    torch.manual_seed(0)
    case = kernels.Case([(9, 1), (0, 5), (17, 3)], heads=4, key_dim=16, value_dim=16)
    assert kernels.check_attention(case, DEVICE)["equal"]
    assert kernels.check_sampling(0.5, DEVICE, quick=True)["equal"]
    assert kernels.check_masks(100, DEVICE)["equal"]


def test_kernels_of_layers_and_packed_checkpoints_are_compared() -> None:
    rows = [*islice(kernels.check_operations(CPU), 6), *islice(kernels.check_rotation(CPU), 3, 5)]
    rows += [*islice(packed.check_matrices(CPU), 2)]
    assert len(rows) == 10
    assert all(row["equal"] for row in rows), rows
    experts, mixture = packed.experts(CPU), {}
    while "gpt_oss" not in mixture:
        mixture |= next(experts)
    assert len(mixture["experts"]) == 12
    assert all(row["equal"] for row in [*mixture["experts"], mixture["gpt_oss"]]), mixture


def test_answers_may_differ_only_from_a_tie_on() -> None:
    model = random_model(real_shape("smollm2-135m", tiny=True))
    prompt = random_prompts(1, 12, model.config.vocab_size)[0]
    with torch.inference_mode():
        order = model(torch.tensor([prompt])).logits[0, -1].argsort(descending=True).tolist()
    best, worst = order[0], order[-1]
    assert answers.tie_distance(model, prompt, best, best) == 0
    (difference,) = answers.compare(model, [prompt], [[best, 1, 2]], [[worst, 1, 2]])
    assert difference["token"] == 0
    assert not difference["is_near_tie"]
    assert not list(answers.compare(model, [prompt], [[best, 1]], [[best, 1]]))


def test_the_section_of_gpt2_has_all_figures() -> None:
    found = found_by(engines.gpt2(CPU))
    assert found["at_once"]["requests"] == found["clients"]["requests"] == 8
    assert found["at_once"]["output_tokens_per_second"] > 0
    assert found["one_token"]["ttft_p99_ms"] > 0
    assert found["steps"]["sequences"] == found["batch"] == 4


def test_the_section_of_a_model_has_all_figures() -> None:
    found = found_by(steps.run(CPU, "llama-3.1-8b"))
    assert [row["sequences"] for row in found["decode"]] == [1, 4]
    more_bytes = found["decode"][1]["bytes"] - found["decode"][0]["bytes"]
    assert more_bytes == pytest.approx(3 * 40 * found["kv_bytes_per_token"], rel=0.02)
    assert found["decode"][1]["operations"] > 3.9 * found["decode"][0]["operations"]
    assert found["prefill"]["steps"] == 8
    assert len(found["prefill"]["ms"]) == 4
    assert found["parts"]["decode"]["sequences"] == 4
    assert found["parts"]["prefill"]["kernels"]


def test_ragged_steps_have_figures() -> None:
    found = found_by(engines.uneven(CPU))
    assert found["uneven"]["bytes"] > found["even"]["bytes"]
    assert found["arrivals"]["mixed_steps"] > 0
    assert found["arrivals"]["itl_p99_to_steady"] >= 1


def test_launches_can_be_watched_for_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    modes_set: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes_set.append)
    with files_of("smollm2-135m", CPU) as files:
        runner = started(files, EngineOptions(kv_blocks=16, max_running=2)).runner
    for name, asked in waits.ASKED.items():
        assert waits.check(runner, name, asked) == {"equal": True}
    assert modes_set == ["error", "default"] * 3 * len(waits.ASKED)
    monkeypatch.setattr(runner, "draw", lambda _: (_ for _ in ()).throw(RuntimeError("called a synchronizing op")))
    assert "synchronizing" in waits.check(runner, "greedy", {})["problem"]
