"""Dry runs of the sections of the GPU check: the same code with tiny models on a CPU."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.engine.model.attention.hook import ATTENTION
from tests.engine.model.runners import eager_runner
from tests.models.decoders import byte_tokenizer
from tools import gpu_check
from tools.engine_load import complete, random_prompts
from tools.gpu import answers, expert_check, layer_check, overload, steps, teaching, uneven, waits
from tools.gpu.target import NOT_ON_CPU, Target
from tools.gpu.workload import load, running_engine

pytestmark = pytest.mark.kernels

CPU = Target(torch.device("cpu"), quick=True)


def found_by(parts: Any) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def test_the_check_runs_one_section_and_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = gpu_check.main(["--out", str(tmp_path), "--device", "cpu", "--quick", "--only", "environment"])
    assert code == 0
    result = json.loads((tmp_path / "gpu_check.json").read_text())["sections"]["environment"]
    assert (result["status"], result["ceilings"]) == ("done", NOT_ON_CPU)
    assert result["versions"]["torch"] == torch.__version__
    assert (tmp_path / "gpu_check.md").read_text() == capsys.readouterr().out.removesuffix("\n")


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


def test_kernels_of_layers_and_packed_checkpoints_are_compared() -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    rows = [*islice(layer_check.check_operations(CPU), 6), *islice(layer_check.check_attention(CPU), 3, 5)]
    rows += [*islice(layer_check.check_matrices(CPU), 2)]
    # torch has no product with scales of blocks on a CPU.
    rows += [row for row in layer_check.check_scaled(CPU) if "left_out" not in row]
    assert len(rows) == 16
    assert all(row["equal"] for row in rows), rows
    assert layer_check.check_checkpoint(layer_check.PACKINGS["AWQ"], CPU)["equal"]
    experts = [*expert_check.check_experts(CPU)]
    assert len(experts) == 10
    assert all(row["equal"] for row in experts), experts


def test_answers_may_differ_only_from_a_tie_on() -> None:
    loaded = load("smollm2-135m", CPU)
    prompt = random_prompts(1, 12, loaded.vocab_size)[0]
    loaded.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        order = loaded.model(torch.tensor([prompt])).logits[0, -1].argsort(descending=True).tolist()
    loaded.model.set_attn_implementation(ATTENTION)
    best, worst = order[0], order[-1]
    assert answers.tie_distance(loaded, prompt, best, best) == 0
    assert loaded.model.config._attn_implementation == ATTENTION
    (difference,) = answers.compare(loaded, [prompt], [[best, 1, 2]], [[worst, 1, 2]])
    assert difference["token"] == 0
    assert not difference["is_near_tie"]
    assert not list(answers.compare(loaded, [prompt], [[best, 1]], [[best, 1]]))


def test_the_section_of_gpt2_has_all_figures() -> None:
    found = found_by(teaching.run(CPU))
    assert found["at_once"]["requests"] == found["clients"]["requests"] == 8
    assert found["at_once"]["output_tokens_per_second"] > 0
    assert found["one_token"]["ttft_p99_ms"] > 0
    assert found["steps"]["sequences"] == found["batch"] == 4


def test_the_section_of_a_model_has_all_figures() -> None:
    found = found_by(steps.run(CPU, "llama-3.1-8b"))
    assert [row["sequences"] for row in found["decode"]] == [1, 4]
    kv_bytes = found["kv_bytes_per_token"]
    assert found["decode"][1]["bytes"] - found["decode"][0]["bytes"] == 3 * 40 * kv_bytes
    assert found["prefill"]["steps"] == 8
    assert len(found["prefill"]["ms"]) == 4
    assert found["parts"]["decode"]["sequences"] == 4
    assert found["parts"]["prefill"]["kernels"]


def test_ragged_steps_have_figures() -> None:
    found = found_by(uneven.run(CPU))
    assert found["uneven"]["bytes"] - found["even"]["bytes"] == 32 * load(uneven.MODEL, CPU).kv_bytes_per_token
    assert found["arrivals"]["mixed_steps"] > 0
    assert found["arrivals"]["itl_p99_to_steady"] >= 1


def test_launches_can_be_watched_for_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    modes_set: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes_set.append)
    runner = eager_runner(load("smollm2-135m", CPU), num_blocks=16, block_size=16)
    for name, asked in waits.ASKED.items():
        assert waits.check(runner, name, asked) == {"equal": True}
    assert modes_set == ["error", "default"] * 3 * len(waits.ASKED)
    monkeypatch.setattr(runner, "draw", lambda _: (_ for _ in ()).throw(RuntimeError("called a synchronizing op")))
    assert "synchronizing" in waits.check(runner, "greedy", {})["problem"]


def test_on_a_cpu_there_is_one_mode() -> None:
    assert answers.modes(CPU) == [{}]
    gpu = Target(torch.device("cuda"), quick=False)
    assert answers.modes(gpu)[-1] == {"compile": True, "cuda_graph": True, "overlap": True}
    assert len(answers.modes(gpu, is_compiled=False)) == 4
    assert answers.modes(gpu, is_compiled=True) == answers.modes(gpu)[-1:]


def test_a_request_that_does_not_finish_fails_the_measurement() -> None:
    with running_engine(load("smollm2-135m", CPU), kv_blocks=8) as engine:
        engine.drain()
        with pytest.raises(Exception, match="shutting down"):
            complete(engine, [[1, 2, 3]], 4)


def test_every_token_decodes_to_text_and_prompts_encode_to_bytes() -> None:
    tokenizer = byte_tokenizer(50257)
    assert len(tokenizer) == 50257
    assert len(tokenizer.encode("wonder full")) == 11
    assert tokenizer.decode([256, 50256]).isalpha()
    assert len(byte_tokenizer(97)) == 256
