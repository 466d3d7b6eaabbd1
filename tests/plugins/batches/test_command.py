"""`oaiserve batch`: each request of a file is answered once, however often the command is stopped."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from oaiserve import cli
from oaiserve.config import Config
from oaiserve.plugins.batches import command as batch
from tests.plugins.batches.test_batches import jsonl, line, waits_for
from tests.serving import Served, serving


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "in.jsonl").write_bytes(jsonl(*map(line, range(1, 31))))
    with serving(Config("org/demo")) as served:
        yield served


def run(served: Served, folder: Path) -> int:
    return cli.main(["batch", str(folder / "in.jsonl"), str(folder / "out.jsonl"), "--url", served.url])


def answered(folder: Path) -> list[str]:
    lines = [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]
    assert all(one["response"] is not None for one in lines)
    return [one["custom_id"] for one in lines]


def names(number: int) -> list[str]:
    return sorted(f"line-{n}" for n in range(1, 1 + number))


def test_all_requests_of_a_file_are_answered_and_their_cost_is_told_before(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(served, tmp_path) == 0
    assert sorted(answered(tmp_path)) == names(30)
    shown = capsys.readouterr().err
    assert shown.startswith("30 requests: about 2")
    assert "at most 150 of answers, a time that is not known yet." in shown
    assert "has the answers to all of the 30 requests." in shown


def test_what_has_its_answer_is_not_asked_again_and_half_a_line_is(served: Served, tmp_path: Path) -> None:
    assert run(served, tmp_path) == 0
    out = tmp_path / "out.jsonl"
    half = b"".join(out.read_bytes().splitlines(keepends=True)[:11])[:-9]
    out.write_bytes(half)
    while not served.engine.submitted.empty():
        served.engine.submitted.get()
    assert run(served, tmp_path) == 0
    assert sorted(answered(tmp_path)) == names(30)
    assert served.engine.submitted.empty(), "the batch that has ended still has all answers"
    assert run(served, tmp_path) == 0
    assert len(answered(tmp_path)) == 30


def test_full_disk_ends_the_command_with_a_sentence_and_the_next_one_continues(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int) -> None:
        if os.fstat(descriptor).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(batch.os, "fsync", full)
        assert run(served, tmp_path) == 2
    out = tmp_path / "out.jsonl"
    assert f"oaiserve batch: '{out}' cannot be written: No space left on device." in capsys.readouterr().err
    assert run(served, tmp_path) == 0
    assert sorted(answered(tmp_path)) == names(30)


def test_failed_requests_are_counted_and_the_first_one_is_shown(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong_model = line(2) | {"body": {**line(2)["body"], "model": "gpt-9"}}
    no_messages = line(3) | {"body": {}}
    (tmp_path / "in.jsonl").write_bytes(jsonl(line(1), wrong_model, no_messages))
    for run_of in ("this run", "an earlier run"):
        assert run(served, tmp_path) == 1, run_of
        shown = capsys.readouterr().err
        assert "2 of them failed. The first is 'line-2': The model 'gpt-9' does not exist." in shown, run_of
    assert sorted(answered(tmp_path)) == names(3)


def test_a_command_that_is_stopped_cancels_its_batch_and_the_next_one_goes_on(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.engine.script = waits_for(7)

    def stop(_: float) -> None:
        if len(answered(tmp_path)) == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(batch.time, "sleep", stop)
        assert run(served, tmp_path) == 130
    assert served.http.get("/v1/batches").json()["data"][0]["status"] == "cancelled"
    served.engine.script = waits_for(10**6)
    assert run(served, tmp_path) == 0
    assert sorted(answered(tmp_path)) == names(30)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n", "must have custom_id, url and body in each line"),
        (jsonl(line(1), line(2, url="/v1/completions")), "make a file for each"),
        (jsonl(line(1) | {"body": 3}), "Line 1: The line is no request of a batch"),
        (jsonl(line(1)) + b"\n" + jsonl(line(2) | {"body": 3}), "Line 3: The line is no request of a batch"),
        (jsonl(line(1), line(2), line(1)), "Lines 1 and 3 of"),
    ],
)
def test_a_wrong_file_is_one_sentence(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    assert run(served, tmp_path) == 2
    assert message in capsys.readouterr().err
