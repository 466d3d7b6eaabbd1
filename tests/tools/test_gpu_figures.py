"""The figures of the GPU check: floors, percentiles, the table of targets, and the text of all results."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.start.gpu.features import FEATURES, all_off
from tools.gpu import summary, workload
from tools.gpu.sections import CHECKS, NOT_ON_CPU, SECTIONS

# The table of targets


def measured() -> dict[str, dict[str, Any]]:
    """Make results of all sections in which every target is met but that of the 8B model's prompts."""
    run = dict.fromkeys(("ttft_p99_ms", "tpot_p50_ms"), 8.0)
    run |= {"requests": 4, "repeats": 2, "output_tokens_per_second": 120_000.0, "submit_p99_ms": 0.003}
    row = {**run, "sequences": 64, "steps": 70, "period_ms": 1.2, "gap_share": 0.01, "bytes": 4e9, "operations": 1e11}
    row["host_ms"] = {"launch": 0.2}
    kernels = {"tokens": 64, "launch_ms": 1.0, "kernels": [{"name": "gemm", "calls": 2.0, "us": 30.0}]}
    model = {"decode": [row], "prefill": {"ms": [1.0, 2.0], "operations_per_second": 0.5e15}}
    model |= {"model": "m", "parts": {"decode": kernels, "prefill": kernels}}
    ceilings = {"bytes_per_second": 4e12, "operations_per_second": 1e15, "bandwidth": {"read": 4e12}}
    found: dict[str, dict[str, Any]] = {
        "environment": {"device": "G", "python": "3.12", "versions": {"torch": "2"}, "ceilings": ceilings},
        **{name: {"llama": {"equal": True}} for name in CHECKS},
        "memory": {"checker": "compute-sanitizer", "Llama": {"equal": True}, "log": ["0 errors"]},
        "gpt2": {"at_once": run, "clients": run, "one_token": run, "steps": row},
        "uneven": {"even": row, "uneven": row, "arrivals": {"mixed_steps": 9, "itl_p99_to_steady": 1.0}},
        "streams": {"streams": run},
        "peers": {"oaiserve": {"decodes of 64": 1.0}, "vllm": {"decodes of 64": 1.0}},
        "decode-1b": model,
        "decode-8b": model,
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


def test_the_floor_of_a_step_is_that_of_what_takes_longer_reading_or_arithmetic() -> None:
    sections = measured()
    reads = {"bytes": 4e9, "operations": 9e11}
    computes = {"bytes": 4e9, "operations": 5e12}
    assert [summary.floor_ms(sections, step) for step in (reads, computes)] == pytest.approx([1.0, 5.0])


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
        ("gpt2", {"status": "done", "off": {"graphs": "no memory"}}),
        ("families", {"status": "done", "llama": {"equal": False}}),
        ("probes", {"status": "done", "Llama": {"equal": True}, "GPT-2": {"equal": False}}),
        ("memory", {"status": "ended after 9 s, its limit"}),
        ("graphs", {"status": "left out"}),
    ],
)
def test_a_check_with_wrong_or_unchecked_answers_fails(name: str, result: dict[str, Any]) -> None:
    assert summary.is_correct(report(measured())["sections"])
    assert not summary.is_correct({**measured(), name: result})
    assert summary.is_correct({"gpt2": {"status": "broke with exit code 1"}})  # it is about speed


def test_each_feature_that_is_off_is_named_with_its_reason_and_fails_the_check() -> None:
    """As on a device on which nothing but plain torch works, in all sections."""
    workload.note_off(all_off("it is broken"), FEATURES)
    try:
        sections = {name: {**result, "off": dict(workload.OFF)} for name, result in measured().items()}
    finally:
        workload.OFF.clear()
    assert not summary.is_correct(sections)
    text = summary.as_text(report(sections))
    for feature in FEATURES:
        assert text.count(f"**{feature} is off**: it is broken") == len(sections)


def test_features_that_every_model_has_must_be_on() -> None:
    off = {
        **dict.fromkeys(workload.ALWAYS_ON, ""),
        "kernels": "Triton is not installed",
        "exact": "cuBLAS chooses kernels by the shape of a step",
    }
    workload.note_off(off)
    try:
        assert workload.OFF == {"kernels": "Triton is not installed"}
    finally:
        workload.OFF.clear()


def test_answers_that_were_not_checked_do_not_count_as_equal() -> None:
    checked = {"a": {"equal": True}, "rows": [{"equal": True}, {"equal": False}], "b": {"problem": NOT_ON_CPU}}
    assert len(summary.compared(checked, equal=True)) == 2
    sections = {**measured(), "families": {"status": "done", "llama": {"problem": NOT_ON_CPU}}}
    assert f"- families: 0 equal\n    - llama: {NOT_ON_CPU}" in summary.as_text(report(sections))
