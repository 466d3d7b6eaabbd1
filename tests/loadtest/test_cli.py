import json
import socket
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest

from loadtest import cli
from loadtest.arrivals import Arrivals
from loadtest.cli import _command_line, disagrees, main, publish, sweep_points
from loadtest.engine_target import EngineRun
from loadtest.errors import UsageError
from loadtest.targets import (
    ARRIVAL_FLAGS,
    ENGINE_FLAGS,
    HTTP_FLAGS,
    IN_PROCESS,
    OVER_HTTP,
    RANDOM_PROMPT_FLAGS,
    arrivals_in_process,
    given_flags,
)
from oaiserve.cli import main as oaiserve_main
from oaiserve.commands.servers import announced

ENGINE = ("run", "--target", "engine")


@pytest.fixture(autouse=True)
def _without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the line that a log gets every ten seconds out of what a slow machine prints."""
    monkeypatch.setattr("loadtest.progress.LOG_SECONDS", inf)


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
        (["run", "--prompt", "a", "--input-len", "9"], "--input-len is for random prompts. Use it without --prompt."),
        (["run", "--prompt", "a", "--requests", "x"], "--prompt and --requests both set the prompts."),
        (["run", "--pretok"], "--pretok needs --target engine. With a server, use --random-form ids"),
        (["run", "--max-batch-size=8"], "--max-batch-size needs --target engine. With a server, start it with --max-r"),
        (["run", "--tokenize-workers", "2"], "--tokenize-workers needs --target engine."),  # also for the default
        ([*ENGINE, "--warmup", "4"], "--warmup needs --target http. In process, use --warmup-runs."),
        ([*ENGINE, "--no-stream"], "--stream needs --target http. In process, use --mode offline for whole answers."),
        ([*ENGINE, "--turns", "2"], "--turns needs --target http. In process, leave it out."),
        ([*ENGINE, "--mode", "offline", "--rate", "2", "--arrival", "poisson"], "--rate needs --mode online"),
        ([*ENGINE, "--mode", "offline", "--stream-interval", "8"], "--stream-interval needs --mode online"),
        ([*ENGINE, "--mode", "offline", "--submit-interval-ms", "1"], "--submit-interval-ms needs --mode online"),
        ([*ENGINE, "--submit-interval-ms", "0", "--concurrency", "2"], "--submit-interval-ms and --concurrency both"),
        ([*ENGINE, "--submit-schedule", "relative"], "--submit-schedule relative needs a --submit-interval-ms above 0"),
        ([*ENGINE, "--pretok"], "--pretok has no effect on random prompts of token ids. Use --random-form words"),
        ([*ENGINE, "--model", "/nowhere"], "'/nowhere'"),
        (["find-max", "--slo", "ttft:1s", "--attainment", "1"], "--attainment below 1"),
        (["run", "--ca-certificate", "/nowhere/ca.pem"], "--ca-certificate is '/nowhere/ca.pem', which cannot be read"),
        (["run", "--ca-certificate", __file__], "which has no certificate in PEM format."),
        (["find-max", "--slo", "ttft:1s", "--num-requests", "16"], "--num-requests is 16, but must be at least 73"),
        (["run", "--url", "http://127.0.0.1:x"], "--url is 'http://127.0.0.1:x', but must be like"),
        (["run", "--url", "http://127.0.0.1:65536"], "--url is 'http://127.0.0.1:65536', but must be like"),
        (["run", "--header", "x"], "--header is 'x', but must be like 'name: value'"),
        (["run", "--header", "x y: z"], "--header is 'x y: z', but must be like 'name: value'"),
        (["run", "--header", "n: \N{EURO SIGN}"], "but must be like 'name: value', in ASCII."),
        (["run", "--api-key", "\N{EURO SIGN}"], "--api-key, or OPENAI_API_KEY, must be printable ASCII"),
        (["run", "--timeout-seconds", "0"], "--timeout-seconds is 0, but must be more than 0."),
        (["null-server", "--port", "65536"], "--port is 65536, but must be from 0 to 65535."),
        (["null-server", "--host", "no host"], "Cannot listen on no host port 8000: "),
        (["null-server", "--tokens-per-event", "0"], "--tokens-per-event is 0, but must be at least 1."),
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


@pytest.mark.parametrize("command", [["run"], ["find-max", "--slo", "ttft:1s"]])
def test_without_a_url_the_server_that_started_last_here_is_measured(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path))
    assert "No server is running here. Start one, as in 'oaiserve serve demo', or give --url." in refusal(
        capsys, *command
    )
    with announced("http://127.0.0.1:1", "earlier"), announced("http://127.0.0.1:9", "later"):
        assert "--url is http://127.0.0.1:9, where no server answers" in refusal(capsys, *command)


def test_a_null_server_on_a_port_in_use_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        sentence = f"Cannot listen on 127.0.0.1 port {port}: "
        assert sentence in refusal(capsys, "null-server", "--port", str(port))


def test_oaiserve_bench_is_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert oaiserve_main(["bench", "run", "--repeats", "0"]) == 2
    assert capsys.readouterr().err == "oaiserve bench: --repeats is 0, but must be at least 1.\n"


def test_each_flag_of_a_run_does_something_for_one_target_or_for_both() -> None:
    arguments = _command_line("bench")["run"].assemble_argument_collection(parse_docstring=True)
    existing = {argument.names[0] for argument in arguments if argument.parse}
    assert existing >= HTTP_FLAGS | ENGINE_FLAGS | ARRIVAL_FLAGS | RANDOM_PROMPT_FLAGS
    assert not HTTP_FLAGS & ENGINE_FLAGS
    assert IN_PROCESS.keys() <= HTTP_FLAGS
    assert OVER_HTTP.keys() <= ENGINE_FLAGS


def test_a_run_in_process_submits_at_once_unless_flags_say_when() -> None:
    poisson = Arrivals(arrival="poisson", rate=3)
    assert arrivals_in_process(["--model"], Arrivals(), EngineRun()).arrival == "at-once"
    assert arrivals_in_process(["--rate", "--arrival"], poisson, EngineRun()) == poisson
    assert arrivals_in_process(["--concurrency"], Arrivals(concurrency=2), EngineRun()) == Arrivals(concurrency=2)
    every_2_ms = arrivals_in_process([], Arrivals(), EngineRun(submit_interval_ms=2))
    assert (every_2_ms.arrival, every_2_ms.rate) == ("constant", 500)


def test_flags_are_found_on_a_command_line_in_all_their_forms() -> None:
    argv = ["run", "--prompt", "a-b", "--no-stream", "--max_batch_size=4", "--html=a=b"]
    assert given_flags(argv) == ["--prompt", "--stream", "--max-batch-size", "--html"]


def test_a_run_against_a_server_imports_no_torch_and_no_engine() -> None:
    code = (
        "import sys; from loadtest.cli import main; assert main(['run', '--url', 'http://127.0.0.1:9']) == 2; "
        "sys.exit(sorted({'torch', 'transformers', 'oaiserve.engine.engine'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr


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
    metrics = {"errors": {}, "num_requests": 3, "num_abandoned": 0}
    run = {"server": {"check": {"status": check}}, "metrics": metrics}
    report: dict[str, Any] = {"points": [{"label": "x", "verdict": verdict, "runs": [run]}]}
    path = tmp_path / "r.json"
    assert publish(report, cli.RunOptions(strict=strict, json=path)) == code
    assert json.loads(path.read_text()) == report
    assert disagrees(report["points"][0]) == (check == "disagree")


@pytest.mark.parametrize(("verdict", "strict", "code"), [("valid", True, 4), ("invalid", True, 3), ("valid", False, 0)])
def test_strict_exits_with_4_and_the_share_if_requests_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verdict: str, strict: bool, code: int
) -> None:
    monkeypatch.setattr(cli, "render", lambda report: "")
    metrics = {"errors": {"http_500, before_first_token": 4, "timeout, mid_stream": 1}, "num_requests": 12}
    runs = [{"metrics": {**metrics, "num_abandoned": abandoned}} for abandoned in (1, 3)]
    report = {"points": [{"label": "x", "verdict": verdict, "runs": runs}]}
    assert publish(report, cli.RunOptions(strict=strict)) == code
    assert (capsys.readouterr().err == "--strict: 10 of 20 requests failed (50.0%).\n") == strict
