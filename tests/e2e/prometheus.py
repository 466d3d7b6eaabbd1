"""Runs the installed Prometheus, with everything that it writes in one folder."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tools.server_process import free_port, running_process

WAIT_SECONDS = 120
SCRAPE_INTERVAL = "500ms"

Labels = frozenset[tuple[str, str]]


@dataclass
class Prometheus:
    http: httpx.Client
    log_file: Path

    def get(self, path: str, **params: str) -> Any:
        """Return the field `data` of the API's answer to a GET."""
        answer = self.http.get(f"/api/v1/{path}", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def query(self, promql: str, at: float | None = None) -> dict[Labels, float]:
        """Return the result of the query, a vector, by labels, now or `at` a Unix time. The name of a metric is its
        label `__name__`."""
        data = self.get("query", query=promql, time=str(time.time() if at is None else at))
        assert data["resultType"] == "vector"
        return {frozenset(sample["metric"].items()): float(sample["value"][1]) for sample in data["result"]}

    def wait_for(self, promql: str, expected: dict[Labels, float]) -> float:
        """Return a Unix time at which the query has the expected result."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (values := self.query(promql, at := time.time())) != expected:
            assert time.monotonic() < deadline, f"{promql} is {values} and not {expected}"
            time.sleep(0.05)  # Prometheus gives no notice of a scrape
        return at

    def trace_ids(self, promql: str) -> set[str]:
        """Return the trace ids in the exemplars of the query's series."""
        now = time.time()  # the API's times are Unix times
        series = self.get("query_exemplars", query=promql, start=f"{now - 600}", end=f"{now + 600}")
        return {exemplar["labels"]["trace_id"] for one in series for exemplar in one["exemplars"]}

    def problems(self) -> list[str]:
        """Return the warnings and errors in the log of Prometheus."""
        return re.findall(r"^.* level=(?:warn|error) .*$", self.log_file.read_text(), re.MULTILINE)


@contextmanager
def running_prometheus(
    folder: Path,
    targets: Mapping[str, str],
    rule_files: Sequence[Path] = (),
    *,
    key: str | None = None,
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes each target, a URL without a path, as the job of that name. It sends the API key,
    if there is one."""
    access = {} if key is None else {"authorization": {"credentials": key}}
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://")]}], **access}
        for job, url in targets.items()
    ]
    intervals = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    config = {
        "global": dict.fromkeys(intervals, SCRAPE_INTERVAL),
        "scrape_configs": jobs,
        "rule_files": [str(file) for file in rule_files],
    }
    config_file = folder / "prometheus.yml"
    log_file = folder / "log"
    config_file.write_text(json.dumps(config))  # JSON is valid YAML
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={config_file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with (
        running_process(command, port, log_file=log_file, ready_path="/-/ready", stop_limit_seconds=0) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        yield Prometheus(http, log_file)
