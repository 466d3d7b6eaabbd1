"""Tests that an engine that stalls raises its alert in a real Prometheus, until it steps again."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy import promql
from tests.e2e.conftest import program_that_launches, serve_process
from tests.e2e.prometheus import running_prometheus

pytestmark = pytest.mark.prometheus

# Steps wait while the file exists.
STALLING_LAUNCH = """
    while os.path.exists(os.environ["STALL_FILE"]):
        time.sleep(0.01)
"""


def quick_alert(folder: Path) -> Path:
    """Write a rule file with the alert of a stalled engine, with shorter times, so that the test need not wait for two
    minutes."""
    (alert,) = (alert for alert in promql.alerts() if alert["alert"] == "OaiserveEngineStalled")
    assert (alert["for"], re.findall(r"\[(\w+)\]", alert["expr"])) == ("1m", ["1m"])
    quick = alert | {"for": "1s", "expr": alert["expr"].replace("[1m]", "[3s]")}
    file = folder / "alerts.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "quick", "rules": [quick]}]}))
    return file


def test_a_stalled_engine_raises_its_alert_until_it_steps_again(small_model: Path, tmp_path: Path) -> None:
    stall = tmp_path / "stall"
    firing = 'count(ALERTS{alertname="OaiserveEngineStalled", alertstate="firing"})'
    body = {"prompt": "Hi", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with (
        serve_process(
            str(small_model),
            tmp_path / "server.log",
            "--kv-blocks",
            "200",
            env={"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"} | {"STALL_FILE": str(stall)},
            program=program_that_launches(STALLING_LAUNCH),
        ) as server,
        running_prometheus(tmp_path, {"oaiserve": server.url}, [quick_alert(tmp_path)]) as prometheus,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        prometheus.wait_for("count(oaiserve_engine_steps_total)", {frozenset(): 1})
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            stall.touch()
            prometheus.wait_for(firing, {frozenset(): 1})
            stall.unlink()
            assert "data: [DONE]" in list(lines)
        prometheus.wait_for(firing, {})
