"""The figures of the GPU check: floors, percentiles, the table of targets, and the text of all results."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.plugins.cuda.start.features import FEATURES, all_off
from tools.gpu import summary, tables, workload
from tools.gpu.sections import CHECKS, NOT_ON_CPU, SECTIONS

# The table of targets


def measured() -> dict[str, dict[str, Any]]:
    """Make results of all sections in which every target is met but that of the 8B model's prompts."""
    decode = {"sequences": 64, "context": 512, "steps": 70, "period_ms": 1.25, "device_ms": 1.2, "gap_ms": 0.01}
    decode |= {"gap_share": 0.01, "bytes": 4e9, "operations": 1e11, "host_ms": {"launch": 0.2, "wait": 9.0}}
    step = {"tokens": 464, "bytes": 4e9, "operations": 1e12, "device_ms": 2.0, "launch_ms": 0.5}
    step |= {"period_ms": 2.1, "alone_ms": 2.4}
    parts = [
        {"part": "down", "us": 1000.0, "calls": 32.0, "bytes": 2e9, "operations": 1e9, "kernel": "gemm"},
        {"part": "attention", "us": 640.0, "calls": 32.0, "bytes": 1e9, "operations": 1e10, "kernel": "ours"},
        {"part": "draw", "us": 9.0, "calls": 2.0, "bytes": 0, "operations": 0, "kernel": "best"},
    ]
    kernels = [
        {"name": "prefill_kernel", "us": 640.0, "calls": 32.0},
        {"name": "decode_kernel", "us": 9.0, "calls": 32.0},
    ]
    profile = {"device_us": 1700.0, "busy_us": 1649.0, "parts": parts, "kernels": kernels}
    model = {
        "model": "m",
        "reference": [{"rows": 64, "products_ms": 0.9, "copy_ms": 1.1}, {"rows": 2048, "products_ms": 25.0}],
        "decode": [decode],
        "steps": {
            "64 decodes, 400 prompt tokens": step,
            "2048 prompt tokens behind 0": {**step, "tokens": 2048, "operations": 2e13, "device_ms": 40.0},
        },
        "profiles": {"decode of 64": profile, "prompt of 2048": profile},
        "attention": [
            {"by": "flash", "tokens": 2048, "earlier": 0, "operations": 1e10, "us": 50.0},
            {"by": "cudnn", "tokens": 2048, "earlier": 0, "operations": 1e10, "problem": "no kernel"},
        ],
    }
    ceilings = {"bytes_per_second": 4e12, "operations_per_second": 1e15, "bandwidth": {"read": 4e12}}
    load = {"requests": 256, "output_tokens_per_second": 50_000.0, "submit_p99": 3e-6, "ttft_p99": 0.04}
    seconds = {"by a kernel": {"16": 1.2e-5, "2048": 3e-3}, "in tiles of 16 by 64": {"16": 1.3e-5}}
    few = {
        "products": {"seconds": seconds, "ways": {"unpacked_from": None}},
        "weight_bytes": 4e9,
        "decode": [{**decode, "device_ms": 1.5}],
        "prompts": [{"tokens": 2048, "bytes": 4e9, "operations": 2e13, "device_ms": 40.0}],
        "profile": profile,
    }
    found: dict[str, dict[str, Any]] = {
        "environment": {"device": "G", "python": "3.12", "versions": {"torch": "2"}, "ceilings": ceilings},
        **{name: {"llama": {"equal": True}} for name in CHECKS},
        "memory": {"checker": "compute-sanitizer", "Llama": {"equal": True}, "log": ["0 errors"]},
        "8b": model,
        "1b": model,
        "gpt2": {"loads": {"at once": load, "one token, 4 workers": load}},
        "quantized": {"AWQ": few},
        "streams": {
            "streams": 256,
            "output_tokens_per_second": 50_000.0,
            "itl_p50_ms": 5.0,
            "itl_p99_ms": 6.0,
            "client": "valid",
            "threads": [{"thread": "engine", "cpu_seconds": 1.0, "us_per_token": 8.5}],
        },
        "offload": {
            "copies": [
                {"blocks": 128, "bytes": 268e6, "launch_ms": 1.0, "step_waits_ms": 0.3, "out_ms": 5.0, "in_ms": 5.36},
            ],
        },
        "few-tokens": {
            "attention": [{"tokens": 64, "context": 30_000, "cut_us": 90.0, "whole_us": 700.0, "difference": 0.01}]
        },
        "latent": {"attention": [{"model": "DeepSeek V3", "rows": 16, "us": 60.0, "gb_per_s": 2500.0}]},
        "penalties": {"draws": [{"rows": 64, "us": 80.0, "us_with_penalties": 95.0}]},
    }
    return {section.name: {"status": "done", "seconds": 1.0, **found[section.name]} for section in SECTIONS}


def report(sections: dict[str, dict[str, Any]], is_dry_run: str = "") -> dict[str, Any]:
    about = {"created": "2026-01-01", "version": "v", "command": "python -m it", "is_dry_run": is_dry_run}
    return json.loads(json.dumps({**about, "sections": sections}))  # type: ignore[no-any-return]


def test_each_target_is_met_or_not_by_what_was_measured_and_by_no_dry_run() -> None:
    rows = summary.targets_table(report(measured()))[1:]
    assert len(rows) == len(summary.SPEED_TARGETS)
    assert [what for what, _, _, met in rows if met != "yes"] == ["8B, prompt of 2,048, of the peak"]
    shown = {what: value for what, value, _, _ in rows}
    assert shown["8B, decode step of 64 at 512 tokens, to its floor"] == "1.20 times"
    assert shown["8B, prompt of 2,048, of the peak"] == "50.0 %"
    dry = summary.targets_table(report(measured(), NOT_ON_CPU))[1:]
    assert {(value, met) for _, value, _, met in dry} == {(NOT_ON_CPU, "")}


def test_the_floor_of_a_step_is_that_of_what_takes_longer_reading_or_arithmetic() -> None:
    sections = measured()
    reads = {"bytes": 4e9, "operations": 9e11}
    computes = {"bytes": 4e9, "operations": 5e12}
    assert [tables.floor_ms(sections, step) for step in (reads, computes)] == pytest.approx([1.0, 5.0])


def test_each_step_stands_beside_its_floor_and_beside_products_alone() -> None:
    sections = measured()
    row = tables.decodes(sections, sections["8b"], "8B")[1]
    assert row == ["64 at 512", "1.25", "1.20", "1.00", "1.20", "0.90", "1.10", "0.01", "0.20", "51,200"]
    mixed, prompt = tables.steps(sections, sections["8b"], "8B")[1:]
    assert mixed == ["64 decodes, 400 prompt tokens", "2.00", "1.00", "2.00", "", "0.50", "2.10", "2.40"]
    assert prompt[:5] == ["2048 prompt tokens behind 0", "40.0", "20.0", "2.00", "25.0"]
    # A layer's attention takes 640 / 32 us, and a kernel that torch lacks is shown as such.
    assert tables.attention(sections["8b"], "8B")[1] == ["2048 behind 0", "20.0 (500)", "50.0 (200)", "none"]


def test_the_parts_that_lose_most_time_are_named_with_what_they_reach() -> None:
    sections = measured()
    said = tables.gaps_of(sections, sections["8b"]["profiles"]["decode of 64"])
    # Down takes 500 us for its bytes at 4 TB/s, and attention 250; nothing runs for 51 us.
    assert said == (
        "950 of 1,700: down 500 of 1,000 (2.00 TB/s), attention 390 of 640 (1.56 TB/s), between kernels 51.0"
    )


def test_the_page_has_a_short_table_of_both_models() -> None:
    text = summary.as_page(report(measured()))
    assert "| decode of 64 at 512 | 1.20 (1.00; 0.90) | 1.20 (1.00; 0.90) |" in text
    assert "| AWQ, 4.00 GB | 1.50 (1.00; 1.50) | 40.0 (20.0; 2.00) |" in text
    assert f"{CHECKS[0]} 1 right, " in text
    assert len(text) < 4000
    assert all(len(line) <= tables.MARGIN for line in text.splitlines() if not line.startswith("|"))


def test_copies_of_blocks_have_their_rates() -> None:
    (said,) = tables.offload(measured())
    assert said == (
        "KV blocks of an 8B in host memory, 128 at once (268 MB): 53.6 GB/s out, 50.0 GB/s in; a step waits 0.30 ms "
        "for them."
    )


def test_all_figures_fit_into_the_end_of_an_output() -> None:
    sections = measured()
    for name in ("8b", "1b"):
        sections[name] = copy.deepcopy(sections[name])
        sections[name]["decode"] *= 7
        steps = sections[name]["steps"].values()
        sections[name]["steps"] = {f"{number} decodes, 400 prompt tokens": next(iter(steps)) for number in range(14)}
        sections[name]["profiles"] = dict.fromkeys(map(str, range(6)), sections[name]["profiles"]["decode of 64"])
    assert len(summary.as_text(report(sections))) < 12_000


def test_a_part_that_failed_is_reported_beside_what_others_found() -> None:
    sections = measured()
    sections["8b"]["problems"] = {"decode": "RuntimeError: no memory"}
    text = summary.as_text(report(sections))
    assert "8b, decode:\n```\nRuntimeError: no memory\n```" in text
    assert "| 64 at 512 |" in text


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


def test_products_are_listed_by_the_ways_that_a_start_tried() -> None:
    assert tables.products(measured()) == [
        ["a layer's products: µs with rows", "16", "2048"],
        ["AWQ, by a kernel", "12.0", "3,000"],
        ["AWQ, in tiles of 16 by 64", "13.0", ""],
    ]
    assert "AWQ, by a kernel" in tables.page(measured(), "today", [])
