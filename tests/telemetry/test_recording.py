"""A recording has the structure of a load and none of its text, stays within its size, and can be sent again."""

import errno
import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.prompts import Workload, make_calls
from oaiserve.errors import StartupError
from oaiserve.facts.record import EngineAccount, Outcome, RequestRecord
from oaiserve.facts.times import RequestTimes
from oaiserve.telemetry.recorder import Recorder
from oaiserve.telemetry.recording import COST_EVERY, Recording, draft_runs
from oaiserve.wire.recordings import BLOCK_TOKENS, block_hashes
from tests.world.loop import World
from tests.world.schedules import schedules

COST = {"rows_ns": [5.0, 6.0]}
EPOCH_NS = 1_000_000_000_000


def opened(path: Path, cost: Callable[[], dict[str, Any] | None] = lambda: None, **options: Any) -> Recording:
    return Recording(path, server={"kv_blocks": 7}, step_cost=cost, epoch_offset_ns=lambda: EPOCH_NS, **options)


@pytest.fixture(scope="module")
def ended(make_record: Callable[..., RequestRecord]) -> Callable[..., RequestRecord]:
    """Return a function that makes the record of an ended request with these prompts."""

    def ended(*prompts: list[int], received_ns: int = 0, salt: str = "", **fields: Any) -> RequestRecord:
        account = EngineAccount(num_choices=len(prompts) or 1, prompts=list(prompts), cache_salt=salt)
        times = RequestTimes(received=received_ns, responded=received_ns + 5)
        common = {"request_id": "req-of-a-client", "operation": "text_completion"}
        return make_record(**common | {"account": account, "times": times} | fields)

    return ended


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded(path: Path, *records: RequestRecord, **options: Any) -> list[dict[str, Any]]:
    """Record these requests, and return the rows of the file after its head."""
    recording = opened(path, **options)
    for record in records:
        recording.add(record)
    recording.close()
    return rows_of(path)[1:]


def common(left: list[Any], right: list[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_a_request_has_its_arrival_lengths_parameters_and_outcome(tmp_path: Path, ended) -> None:
    path = tmp_path / "load.jsonl"
    fields = {"completion_tokens": 12, "params": {"temperature": 0.5}, "finish_reasons": ("stop",)}
    request = ended([1] * 70, received_ns=2_500_000_000, client="alice", **fields)
    row, cost = recorded(path, request, cost=lambda: COST)
    assert rows_of(path)[0] == {"recording": 1, "block_tokens": BLOCK_TOKENS, "server": {"kv_blocks": 7}}
    assert row["timestamp"] == 1002.5
    assert (row["input_length"], row["output_length"], row["n"]) == (70, 12, 1)
    assert (row["outcome"], row["params"], row["finish_reasons"]) == ("finished", {"temperature": 0.5}, ["stop"])
    assert row["phases_ns"] == {"receive": 5}
    assert cost == {"step_cost": COST}
    content = path.read_text()
    assert not any(secret in content for secret in ("alice", "req-of-a-client"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_prompts_of_a_request_are_rows_and_vectors_and_unknown_prompts_are_not(tmp_path: Path, ended) -> None:
    path = tmp_path / "load.jsonl"
    two = ended([1, 2], [3], completion_tokens=8)
    vector = ended([1], operation="embeddings")
    first, second, refused = recorded(path, two, vector, ended(outcome=Outcome.REJECTED, http_status=429))
    assert [(row["input_length"], row["output_length"]) for row in (first, second)] == [(2, 4), (1, 4)]
    assert (refused["outcome"], "input_length" in refused) == ("rejected", False)
    assert len(make_calls(Workload(requests=path), 0)) == 2


@settings(max_examples=30)
@given(data=st.data())
def test_blocks_are_equal_as_far_as_prompts_are(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, ended
) -> None:
    size = st.integers(0, 3 * BLOCK_TOKENS)
    shared = random.Random(1).choices(range(9), k=data.draw(size))
    one, other = ([*shared, k, *([k] * data.draw(size))] for k in (10, 11))
    salts = data.draw(st.sampled_from([("", ""), ("a", "a"), ("a", "b")]))
    path = tmp_path_factory.mktemp("recording") / "load.jsonl"
    rows = recorded(path, *(ended(prompt, salt=salt) for prompt, salt in zip((one, other), salts, strict=True)))
    assert [len(block_hashes(row)) for row in rows] == [len(prompt) // BLOCK_TOKENS for prompt in (one, other)]
    expected = len(shared) // BLOCK_TOKENS if salts[0] == salts[1] else 0
    assert common(block_hashes(rows[0]), block_hashes(rows[1])) == expected
    # Sent again, they have as many tokens, and are alike as far.
    first, second = (list(call.prompt) for call in make_calls(Workload(requests=path), 0))
    assert (len(first), len(second)) == (len(one), len(other))
    assert common(first, second) // BLOCK_TOKENS == expected


def test_a_recording_is_replayed_at_its_times_with_what_makes_it_as_much_work(tmp_path: Path, ended) -> None:
    path = tmp_path / "load.jsonl"
    account = {"completion_tokens": 9, "params": {"temperature": 0, "seed": 3, "logprobs": 2}}
    recorded(path, ended([1] * 5, received_ns=7 * 10**9, **account))
    (call,) = make_calls(Workload(requests=path), 0)
    assert (call.max_tokens, call.timestamp, call.body) == (9, 1007.0, {"temperature": 0})


def test_a_file_that_is_full_is_kept_beside_a_new_one(tmp_path: Path, ended) -> None:
    path = tmp_path / "load.jsonl"
    recorded(path, *[ended([1] * 200)] * 20, cost=lambda: COST, most_bytes=2000)
    files = [tmp_path / "load.jsonl.1", path]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    for file in files:
        rows = rows_of(file)
        assert rows[0]["recording"] == 1
        assert rows[-1] == {"step_cost": COST}
        assert file.stat().st_size < 3000
    # The salt is the same in both, so that what was shared stays so.
    assert len({row["blocks"] for file in files for row in rows_of(file)[1:-1]}) == 1


def test_another_start_keeps_the_recording_of_the_one_before(tmp_path: Path, ended) -> None:
    path = tmp_path / "load.jsonl"
    (before,), (after,) = (recorded(path, ended([1] * 64)) for _ in range(2))
    assert rows_of(tmp_path / "load.jsonl.1")[1] == before
    assert before["blocks"] != after["blocks"]  # another salt


@pytest.mark.parametrize("rotates", [False, True], ids=["within a file", "at the beginning of one"])
@schedules(1)
def test_a_recording_goes_on_when_the_disk_has_room_again_and_says_what_it_lacks(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rotates: bool,
    ended,
) -> None:
    path = tmp_path / "load.jsonl"
    recording = opened(path, most_bytes=0 if rotates else 10**6)
    errors: list[str] = []
    telemetry = Recorder({"recording": recording.add}, errors.append, runtime=world)
    write = os.write
    caplog.set_level("INFO")
    with monkeypatch.context() as patch:
        for number, room in enumerate((10, 0)):  # bytes; half a line is taken back
            patch.setattr(os, "write", full if room == 0 else lambda file, content: write(file, content[:10]))
            telemetry.record(ended([1] * number))
            telemetry.wait_for_queued(60)
            assert len(errors) == number + 1
    telemetry.record(ended([2, 3]))
    assert telemetry.close(60)
    recording.close()
    assert errors == ["recording", "recording"]
    assert [row.get("input_length") for row in rows_of(path)] == [None, 2]
    warning, goes_on = caplog.messages
    assert f": No space left on device ({path}). Further failures are logged once a minute" in warning
    assert goes_on == f"The recording {path} goes on; requests missing from it: 2"
    assert [record.exc_info for record in caplog.records] == [None, None]


def test_a_recording_that_ends_on_a_full_disk_is_closed_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ended
) -> None:
    recording = opened(tmp_path / "load.jsonl", lambda: COST)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left on device: '.*load.jsonl'"):
            recording.add(ended([1]))
        recording.close()
    missing, cost = caplog.messages
    assert missing == f"The last requests are missing from the recording {tmp_path / 'load.jsonl'}: 1"
    assert cost.startswith("What steps cost is not in the recording")


def full(file: int, content: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--record-requests is .* which cannot be written to: Is a directory"):
        opened(tmp_path)


def test_what_steps_cost_can_be_read_while_the_server_runs(tmp_path: Path, ended) -> None:
    recording = opened(tmp_path / "load", lambda: COST)
    for _ in range(2 * COST_EVERY):
        recording.add(ended([1, 2]))
    rows = rows_of(tmp_path / "load")
    assert [index for index, row in enumerate(rows) if "step_cost" in row] == [1 + COST_EVERY]
    recording.close()
    assert rows_of(tmp_path / "load") == rows


def test_tokens_of_drafts_are_runs_of_an_answer() -> None:
    def runs(*gaps_ms: int, accepted: int = 1, choices: int = 1) -> list[int]:
        account = EngineAccount(num_choices=choices, num_accepted_tokens=accepted)
        account.inter_token_ns.extend(gap_ms * 10**6 for gap_ms in gaps_ms)
        return draft_runs(account)

    assert runs(9, 9, 9, accepted=0) == []
    assert runs(9, 0, choices=2) == []
    assert runs(9, 0, 0, 9, 9) == [1, 3, 2]
    assert runs(9, 9, 0, 9, 0, 0) == [2, 5]
