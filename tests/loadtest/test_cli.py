import json
import socket
from pathlib import Path
from typing import Any

import pytest

from loadtest import cli
from loadtest.arrivals import Arrivals
from loadtest.cli import disagrees, main, publish, sweep_points
from loadtest.errors import UsageError
from oaiserve.cli import main as oaiserve_main


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("loadtest: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["run", "--arrival", "poisson"], "--arrival poisson needs a --rate in requests per second, or a --sweep."),
        (["run", "--slo", "x:1ms"], "--slo has 'x:1ms'"),
        (["run", "--repeats", "0"], "--repeats is 0, but must be at least 1."),
        (["run", "--urll", "x"], "--urll"),
        (["run", "--sweep", "1,x"], "--sweep is '1,x'"),
        (["run", "--sweep", "1.5"], "whole ones"),
        (["run", "--trace-share", "2"], "--trace-share is 2"),
        (["run", "--scrape-seconds", "-1"], "--scrape-seconds is -1"),
        (["run", "--samples", "/nowhere/x"], "--samples is '/nowhere/x', which cannot be written"),
        (["find-max", "--slo", "ttft:1s", "--attainment", "1"], "--attainment below 1"),
        (["compare", "/nowhere/a.json", "/nowhere/b.json"], "'/nowhere/a.json' cannot be read"),
    ],
)
def test_a_wrong_option_gives_one_sentence_on_stderr_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], sentence: str
) -> None:
    assert sentence in refusal(capsys, *argv, *(["--url", "http://127.0.0.1:9"] if "--sweep" in argv else []))


def test_the_message_names_the_url_if_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert f"--url is {url}, where no server answers" in refusal(capsys, "run", "--url", url)


def test_oaiserve_bench_is_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert oaiserve_main(["bench", "run", "--repeats", "0"]) == 2
    assert capsys.readouterr().err == "oaiserve bench: --repeats is 0, but must be at least 1.\n"


def test_a_sweep_has_a_point_for_each_rate_or_number_of_users() -> None:
    assert [point.label for point in sweep_points(Arrivals(sweep="1,8"))] == ["1 user", "8 users"]
    labels = [point.label for point in sweep_points(Arrivals(arrival="poisson", sweep="0.5,2"))]
    assert labels == ["poisson, 0.5 requests/s", "poisson, 2 requests/s"]
    assert sweep_points(Arrivals(arrival="poisson", rate=1)) == [Arrivals(arrival="poisson", rate=1)]
    assert Arrivals(arrival="at-once").label == "at-once"
    with pytest.raises(UsageError, match="has no meaning"):
        sweep_points(Arrivals(arrival="at-once", sweep="1,2"))


@pytest.mark.parametrize(
    ("verdict", "check", "strict", "code"),
    [
        ("valid", "agree", True, 0),
        ("suspect", "agree", True, 0),
        ("invalid", "agree", True, 3),
        ("valid", "disagree", True, 3),
        ("invalid", "disagree", False, 0),
    ],
)
def test_strict_exits_with_3_if_the_client_is_invalid_or_disagrees_with_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdict: str, check: str, strict: bool, code: int
) -> None:
    monkeypatch.setattr(cli, "render", lambda report: "")
    report: dict[str, Any] = {
        "points": [{"label": "x", "verdict": verdict, "runs": [{"server": {"check": {"status": check}}}]}]
    }
    path = tmp_path / "r.json"
    assert publish(report, cli.RunOptions(strict=strict, json=path)) == code
    assert json.loads(path.read_text()) == report
    assert disagrees(report["points"][0]) == (check == "disagree")
