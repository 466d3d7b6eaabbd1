"""Recordings are read, and other files are refused by name."""

from pathlib import Path

import pytest

from oaiserve.errors import StartupError
from oaiserve.explain.step_cost import StepCost
from tests.recordings import COST, row, written
from tools.replay.recorded import Cost, read


def test_a_recording_has_prompts_alike_as_far_as_their_blocks_are(tmp_path: Path) -> None:
    a, b, c = ("0" * 9 + letter for letter in "abc")
    head = {"recording": 1, "block_tokens": 64, "server": {"kv_blocks": 9, "policy": "fcfs", "model": "demo"}}
    refused = {"timestamp": 3.0, "outcome": "rejected", "output_length": 0, "phases_ns": {}}
    rows = [row(7.5, 130, 4, (a, b)), row(5.0, 70, 3, (a,)), row(6.0, 128, 2, (a, c)), refused]
    load = read(written(tmp_path / "load", head, *rows, {"step_cost": COST}))
    assert [(one.seconds, len(one.prompt), one.answer_tokens) for one in load.arrivals] == [
        (0.0, 70, 3),
        (1.0, 128, 2),
        (2.5, 130, 4),
    ]
    first, second, third = (one.prompt for one in load.arrivals)
    assert first[:64] == second[:64] == third[:64]
    assert not set(second[64:]) & set(third[64:])
    assert not set(first[64:]) & set(second + third)
    assert (load.server.kv_blocks, load.server.policy) == (9, "fcfs")
    step = StepCost(tuple(COST["rows_ns"]), draw_ns=5.0)  # type: ignore[arg-type]
    assert load.cost == Cost(step, host_seconds=0.002, before_queue_seconds=0.003, delivery_seconds=0.001)
    assert load.tpot_seconds == pytest.approx((0.001 / 3 + 0.001 / 2 + 0.001) / 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be a recording"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2}\n', "must be a recording"),
        ('{"recording": 1, "block_tokens": 64, "server": {}}\n', "has 0 requests"),
        ('{"a": 1}\n{"b": 2}\n', "must be a recording"),
        ("no json", "must be a recording"),
        ("[1]", "must be a recording"),
        ('{"recording": 1}\n{"timestamp": 1}\n', "must be a recording"),
    ],
)
def test_other_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "load"
    path.write_text(content)
    with pytest.raises(StartupError, match=message):
        read(path)
    with pytest.raises(StartupError, match="No such file"):
        read(tmp_path / "missing")
