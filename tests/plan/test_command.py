"""The command answers from a recording, and says in one sentence what is wrong with its options."""

import json
from pathlib import Path

import pytest

from oaiserve.cli import main
from tests.plan.recordings import COST, row, written


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    server = {"kv_blocks": 512, "max_running": 16, "max_step_tokens": 128}
    head, rows = {"recording": 1, "block_tokens": 64, "server": server}, [row(k / 4, 20 + k, 8) for k in range(20)]
    return written(tmp_path / "load.jsonl", head, *rows, {"step_cost": COST})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Give a load that does not say what steps cost."""
    return written(tmp_path / "trace", *({"timestamp": at, "input_length": 5, "output_length": 2} for at in (4, 6)))


def test_a_plan_has_the_rate_the_replicas_and_the_settings(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    arguments = ["plan", "--from", str(recording), "--slo", "ttft:100ms,itl:20ms", "--rate", "5000"]
    assert main([*arguments, "--no-settings", "--json", str(out)]) == 0
    text, found = capsys.readouterr().out, json.loads(out.read_text())
    assert "The load: 20 prompts in 5 s (4/s)" in text
    assert f"up to {found['highest_rate']:.3g} prompts/s on one server" in text
    assert found["replicas"] == -(-5000 // found["highest_rate"])
    assert found["recorded"]["good_share"] == 1.0
    assert found["rates"][3]["good_share"] >= 0.95 > found["rates"][-1]["good_share"]
    assert "(as recorded)" in text


@pytest.mark.parametrize(("num_clients", "whose"), [(1, "one client that waited"), (3, "3 clients that each waited")])
def test_clients_that_wait_for_answers_tell_no_rate(
    num_clients: int, whose: str, recording: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *rows, cost = map(json.loads, recording.read_text().splitlines())
    for index, one in enumerate(rows):  # each client asks 10 ms after its answer
        turn, client = divmod(index, num_clients)
        one["timestamp"] = 100 + 0.21 * turn + 0.1 * client
        one["phases_ns"] = dict.fromkeys(one["phases_ns"], 0) | {"decode": 200_000_000}
    written(recording, head, *rows, cost)
    assert main(["plan", "--from", str(recording), "--slo", "ttft:100ms"]) == 2
    error = capsys.readouterr().err
    assert f"is of a closed loop: of {whose} for an answer" in error
    assert "tells no rate" in error
    rest = ["--cost", str(recording), "--no-settings"]  # what its steps cost is of use for other loads
    assert main(["plan", "--from", str(trace), "--slo", "ttft:9s", *rest]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo", "ttft:3"], "--slo has 'ttft:3', but must be METRIC:TIME"),
        (["--slo", "speed:3ms"], "--slo has 'speed:3ms'"),
        (["--slo", "ttft:3ms", "--attainment", "2"], "--attainment is 2"),
        (["--slo", "ttft:3ms", "--rate", "0"], "--rate is 0"),
        (["--slo", "ttft:3ms", "--cost", "missing"], "--cost is 'missing', which cannot be read"),
        ([], "--slo is missing. See 'oaiserve plan --help'."),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], message: str, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--from", str(recording), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_load_without_a_cost_needs_one(trace: Path, recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", str(trace), "--slo", "ttft:9s"]) == 2
    assert "does not say what steps cost. Give --cost a recording" in capsys.readouterr().err
    assert main(["plan", "--from", str(trace), "--slo", "ttft:9s", "--cost", str(recording), "--no-settings"]) == 0


def test_limits_of_a_lone_request_need_no_replicas_and_settings_without_effect_no_rows(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    head, *rows, cost = map(json.loads, recording.read_text().splitlines())
    for index, one in enumerate(rows):  # each second one comes 1 ms after another
        one["timestamp"] = index // 2 + index % 2 / 1000
    written(recording, head, *rows, cost)
    arguments = ["plan", "--from", str(recording), "--json", str(out), "--rate", "5", "--slo"]
    assert main([*arguments, "latency:1us", "--no-settings"]) == 0
    lone_ms = json.loads(out.read_text())["alone"]["ttft_seconds"]["p99"] * 1e3
    capsys.readouterr()
    assert main([*arguments, f"itl:99s,ttft:{lone_ms * 1.01:.6f}ms", "--attainment", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    found = json.loads(out.read_text())
    assert "these limits are those of a lone request here" in text
    assert found["is_lone"]
    assert found["replicas"] is None
    assert "replicas." not in text
    assert found["settings"]
    assert "| 1.00 |" not in text


def test_where_no_rate_is_low_enough_the_limit_is_named_that_is_too_strict(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--from", str(recording), "--slo", "ttft:1us,latency:99s", "--no-settings"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no rate is low enough" in text
    assert "0% are good (by limit: ttft 0%, latency 100%)" in text
