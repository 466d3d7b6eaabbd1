"""The figures of the GPU check: floors, percentiles, the table of targets, and the text of all results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.request import Finished, Usage
from oaiserve.facts.record import EngineAccount, HostPart, StepKind, StepRecord
from oaiserve.facts.times import RequestTimes
from tools import gpu_check
from tools.bench.floor import DecoderShape
from tools.engine_load import EngineRun, figures, percentile
from tools.gpu import summary
from tools.gpu.sections import CHECKS, NOT_ON_CPU, SECTIONS
from tools.gpu.steps import prefill_figures, step_figures


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.sampled_from([0.01, 0.1, 0.5, 0.99, 1.0]))
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert all(sum(other <= value for other in values) < share * len(values) for value in values if value < found)


def finished(received: int, first: int, last: int) -> Finished:
    times = RequestTimes(received=received, first_token=first, last_token=last)
    return Finished("r", Usage(1, 0, 4), times, EngineAccount())


def test_figures_of_a_run_are_medians_over_repeats_of_percentiles_over_requests() -> None:
    runs = [
        EngineRun(seconds, [finished(0, ms * 10**6, (ms + 6) * 10**6) for ms in (10, 20, 30, 40)], [1000, 3000], 4)
        for seconds in (1.0, 2.0, 4.0)
    ]
    found = figures(runs)
    assert found["output_tokens_per_second"] == 8
    assert (found["output_tokens_per_second_least"], found["output_tokens_per_second_most"]) == (4, 16)
    assert (found["ttft_p50_ms"], found["ttft_p99_ms"]) == (20, 40)
    assert found["tpot_p50_ms"] == 2
    assert found["submit_p99_ms"] == 0.003


def step(kind: StepKind, sequences: int, tokens: int, device_ms: int, gap_ms: int) -> StepRecord:
    host_ns = {HostPart.LAUNCH: 2_000_000, HostPart.IDLE: 5}
    return StepRecord(kind, 0, device_ms * 10**6, gap_ms * 10**6, sequences, tokens, host_ns=host_ns)


def test_step_figures_count_only_steps_in_which_the_whole_batch_decodes() -> None:
    records = [step(StepKind.MIXED, 4, 40, 90, 90), step(StepKind.DECODE, 3, 3, 50, 50)]
    records += [step(StepKind.DECODE, 4, 4, 9, 1)] * 3
    found = step_figures(records, 4)
    assert (found["steps"], found["period_ms"], found["device_ms"], found["gap_share"]) == (3, 10, 9, 0.1)
    assert found["host_ms"]["launch"] == 2
    assert "idle" not in found["host_ms"]
    with pytest.raises(RuntimeError, match="No step had 5"):
        step_figures(records, 5)


def test_prefill_figures_are_medians_over_chunks_at_the_same_place() -> None:
    shape = DecoderShape(2, 64, 64, 32, 128, 512, element_bytes=2, cached_bytes=256, weight_bytes=2)
    records = [step(StepKind.PREFILL, 1, 16, ms, 0) for ms in (2, 4, 2, 6)]
    found = prefill_figures(shape, records, 16, 32)
    assert found["ms"] == [2, 5]
    assert found["operations_per_second"] == pytest.approx(sum(found["operations"]) / 7e-3)
    with pytest.raises(RuntimeError, match="2 chunks"):
        prefill_figures(shape, records[:3], 16, 32)


# The table of targets


def measured() -> dict[str, dict[str, Any]]:
    """Make results of all sections in which every target is met but that of the 8B model's prompts."""
    run = dict.fromkeys(("ttft_p99_ms", "tpot_p50_ms"), 8.0)
    run |= {"requests": 4, "repeats": 2, "output_tokens_per_second": 120_000.0, "submit_p99_ms": 0.003}
    row = {**run, "sequences": 64, "steps": 70, "period_ms": 1.2, "gap_share": 0.01, "bytes": 4e9}
    row["host_ms"] = {"launch": 0.2}
    kernels = {"tokens": 64, "launch_ms": 1.0, "kernels": [{"name": "gemm", "calls": 2.0, "us": 30.0}]}
    model = {"decode": [row], "prefill": {"ms": [1.0, 2.0], "operations_per_second": 0.5e15}}
    model |= {"model": "m", "parts": {"decode": kernels, "prefill": kernels}}
    ceilings = {"bytes_per_second": 4e12, "operations_per_second": 1e15, "bandwidth": {"read": 4e12}}
    found: dict[str, dict[str, Any]] = {
        "environment": {"device": "G", "python": "3.12", "versions": {"torch": "2"}, "ceilings": ceilings},
        **{name: {"llama": {"equal": True}} for name in CHECKS},
        "kernels": {"attention": [{"equal": True}], "sampling": []},
        "gpt2": {"at_once": run, "clients": run, "one_token": run, "steps": row},
        "uneven": {"even": row, "uneven": row, "arrivals": {"mixed_steps": 9, "itl_p99_to_steady": 1.0}},
        "streams": {"streams": run},
        "decode-1b": model,
        "decode-8b": model,
        "split": {"left_out": "there is one GPU"},
    }
    return {section.name: {"status": "done", "seconds": 1.0, **found[section.name]} for section in SECTIONS}


def report(sections: dict[str, dict[str, Any]], is_dry_run: str = "") -> dict[str, Any]:
    about = {"created": "2026-01-01", "version": "v", "command": "python -m it", "is_dry_run": is_dry_run}
    return json.loads(json.dumps({**about, "sections": sections}))  # type: ignore[no-any-return]


def test_each_target_is_met_or_not_by_what_was_measured_and_by_no_dry_run() -> None:
    rows = summary.targets_table(report(measured()))[1:]
    assert len(rows) == len(summary.SPEED_TARGETS)
    assert [what for what, _, _, met in rows if met != "yes"] == ["8B, prompts in chunks of 2,048, of the peak"]
    shown = {what: value for what, value, _, _ in rows}
    assert shown["8B, decode step of 64 at 512 tokens, to its floor"] == "1.20 times"
    assert shown["8B, prompts in chunks of 2,048, of the peak"] == "50.0 %"
    dry = summary.targets_table(report(measured(), NOT_ON_CPU))[1:]
    assert {(value, met) for _, value, _, met in dry} == {(NOT_ON_CPU, "")}


def test_a_figure_that_was_not_found_is_shown_as_missing() -> None:
    sections = measured()
    del sections["decode-8b"]
    sections["environment"].pop("ceilings")
    rows = summary.targets_table(report(sections))[1:]
    missing = {what for what, value, _, _ in rows if value == "missing"}
    assert {what for what in missing if what.startswith("8B")} == {w for w, *_ in rows if w.startswith("8B")}
    assert sum(what.startswith("1B") for what in missing) == 2


@given(st.data())
def test_incomplete_results_have_a_text(data: st.DataObject) -> None:
    """Sections may be left out, or end with a part of their results."""
    sections = measured()
    for name in data.draw(st.lists(st.sampled_from(list(sections)), unique=True)):
        result = copy.deepcopy(sections[name])
        for key in data.draw(st.lists(st.sampled_from(list(result)), unique=True)):
            del result[key]
        sections[name] = {"status": "ended after 9 s, its limit", "problem": "why", **result}
    text = summary.as_text(report(sections))
    assert all(name in text for name in sections)


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("families", {"status": "done", "llama": {"equal": False}}),
        ("kernels", {"status": "done", "attention": [{"equal": True}, {"equal": False}]}),
        ("overload", {"status": "ended after 9 s, its limit"}),
        ("graphs", {"status": "left out"}),
    ],
)
def test_a_check_with_wrong_or_unchecked_answers_fails(name: str, result: dict[str, Any]) -> None:
    assert summary.is_correct(report(measured())["sections"])
    assert not summary.is_correct({**measured(), name: result})
    assert summary.is_correct({"gpt2": {"status": "broke with exit code 1"}})  # it is about speed


def test_answers_that_were_not_checked_do_not_count_as_equal() -> None:
    checked = {"a": {"equal": True}, "rows": [{"equal": True}, {"equal": False}], "b": {"problem": NOT_ON_CPU}}
    assert len(summary.compared(checked, equal=True)) == 2
    sections = {**measured(), "overload": {"status": "done", "out_of_memory": {"problem": NOT_ON_CPU}}}
    assert f"- overload: 0 equal\n    - out_of_memory: {NOT_ON_CPU}" in summary.as_text(report(sections))


def test_of_several_results_the_last_of_a_section_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(report({"gpt2": {"status": "a"}, "families": {"status": "b"}})))
    second.write_text(json.dumps(report({"gpt2": {"status": "c"}})))
    found = gpu_check.together([first, second])["sections"]
    assert {name: result["status"] for name, result in found.items()} == {"families": "b", "gpt2": "c"}


def test_the_text_goes_between_the_markers_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page = tmp_path / "gpu_check.json", tmp_path / "page.md"
    results.write_text(json.dumps(report(measured())))
    page.write_text("before\n<!-- gpu -->\nold\n<!-- end of gpu -->\nafter\n")
    assert gpu_check.main(["--show", str(results), "--markdown", str(page)]) == 0
    assert "old" not in page.read_text()
    text = summary.as_text(report(measured()))
    assert text.strip() in page.read_text()
    assert "gemm" in text
    assert "times_floor" in text
    assert capsys.readouterr().out.startswith("G; Python 3.12")
