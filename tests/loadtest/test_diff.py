"""A difference finds the part that changed, says how surely, and adds up."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.accounts import Account, difference, read
from loadtest.cli import main
from tests.recordings import row, written

PARTS = [("queue", "batch_full"), ("prefill", "alone"), ("decode", "neighbour_decodes"), ("respond", "")]


def accounts(rng: random.Random, number: int, **more_ms: float) -> list[Account]:
    """Return accounts with parts of about 100 ms; the decode of each has `more_ms`."""

    def parts() -> dict[tuple[str, str], int]:
        return {part: int(1e6 * (rng.gauss(100, 10) + more_ms.get(part[0], 0))) for part in PARTS}

    return [Account(float(index), 100, 0, 64, parts()) for index in range(number)]


def test_the_part_that_changed_is_certain_and_the_others_are_not() -> None:
    rng = random.Random(1)
    result = difference(accounts(rng, 200), accounts(rng, 200, decode=50))
    assert [part for part, change in result.parts.items() if change.is_certain] == [("decode", "neighbour_decodes")]
    assert result.parts["decode", "neighbour_decodes"].change == pytest.approx(0.05, abs=0.005)
    assert result.duration.is_certain
    assert result.load["requests/s"].before == 1


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = random.Random(2)
    inside = 0
    for _ in range(200):
        interval = difference(accounts(rng, 40), accounts(rng, 60)).duration.interval
        inside += interval[0] <= 0 <= interval[1]
    assert 0.90 <= inside / 200 <= 0.995


ANY_PARTS = st.dictionaries(st.sampled_from(PARTS), st.integers(0, 10**10))
ACCOUNTS = st.lists(ANY_PARTS.map(lambda parts: Account(0.0, 1, 0, 1, parts)), min_size=1, max_size=9)


@settings(max_examples=30)
@given(ACCOUNTS, ACCOUNTS)
def test_the_changes_of_parts_add_up(before: list[Account], after: list[Account]) -> None:
    result = difference(before, after)
    assert sum(change.change for change in result.parts.values()) == pytest.approx(result.duration.change, abs=1e-9)


def recorded(path: Path, decode_ms: int, number: int = 40, model: str = "demo") -> Path:
    rng = random.Random(path.name)
    rows = []
    for index in range(number):
        alone, queue = (int(rng.gauss(mean, 2) * 1e6) for mean in (decode_ms, 20))
        phases_ns = {"receive": 5, "queue": queue, "decode": alone + 3}
        causes = {"causes_ns": {"decode": {"alone": alone}}, "queue_waits_ns": {"batch_full": queue}}
        rows.append(row(index, 9, 4, cached_tokens=0, phases_ns=phases_ns, **causes))
    return written(path, {"recording": 1, "block_tokens": 64, "server": {"model": model}}, *rows)


def test_a_recording_has_phases_causes_and_what_has_none(tmp_path: Path) -> None:
    account, *_ = read(recorded(tmp_path / "a", 80))
    parts = dict(account.parts_ns)
    assert (parts.pop(("receive", "")), parts.pop(("decode", ""))) == (5, 3)
    assert set(parts) == {("queue", "batch_full"), ("decode", "alone")}


def test_the_command_names_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = recorded(tmp_path / "a", 80)
    after = recorded(tmp_path / "b", 130)
    assert main(["diff", str(before), str(after)]) == 0
    text, _, table = capsys.readouterr().out.partition("\n\n")
    assert text.startswith("A request took 100 ms on average, and then 150 ms: +49")
    assert "By cause: decode (alone) +49" in text
    assert "queue" not in text
    assert "| decode | alone |" in table
    assert main(["diff", str(before), str(before), "--no-table"]) == 0
    assert "That may be chance. No cause changed for certain." in capsys.readouterr().out


def test_what_cannot_be_compared_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "neither").write_text("{}")
    (tmp_path / "empty").write_text('{"requests": []}')
    (tmp_path / "newer").write_text('{"recording": 2}\n')
    recorded(tmp_path / "head", 80, number=0)
    for name, message in (
        ("neither", "must be a recording (serve --record-requests) or an answer of /debug/requests; reports of"),
        ("newer", "/debug/requests: it is a recording of version 2, but this reads version 1.\n"),
        ("head", "has no request that was answered"),
        ("empty", "has no request that was answered"),
        ("missing", "cannot be read: No such file"),
    ):
        assert main(["diff", str(tmp_path / name), str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_requests_of_different_models_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = recorded(tmp_path / "a", 80)
    b = recorded(tmp_path / "b", 80, model="other")
    assert main(["diff", str(a), str(b)]) == 2
    said = capsys.readouterr()
    assert "has requests of demo, and" in said.err
    assert "of other: times of different models do not compare" in said.err
    assert said.out == ""
