"""The server under soak: started, sampled once a second, and stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from oaiserve.telemetry import names
from tools.figures import free_port

ROOT = Path(__file__).parents[2]
# A cache that is soon full, so that its pages are touched early; limits that the clients do reach. float32, because in
# bfloat16 oneDNN keeps code for each number of tokens that a step ever had: half a GiB that takes minutes to be there.
FLAGS = (
    *("--dtype", "float32", "--kv-cache-memory", "48MiB", "--max-running", "24", "--max-waiting", "16"),
    *("--write-timeout-seconds", "1"),
)
START_SECONDS, ANSWER_SECONDS, STOP_SECONDS = 120, 300, 60


@dataclass(frozen=True)
class Sample:
    """The server at one moment: its page of metrics, and what the system says of a process of ours."""

    at_seconds: float
    values: dict[str, float]  # by series, as on the page
    num_threads: int | None = None

    def total(self, metric: names.Metric, label: str = "") -> float:
        """Over all series of a metric, or those with that label."""
        of_metric = self.values.items()
        return sum(value for name, value in of_metric if name.partition("{")[0] == metric.name and label in name)

    @property
    def rss_mib(self) -> float:
        return self.values["process_resident_memory_bytes"] / 2**20

    @property
    def num_fds(self) -> int:
        return int(self.values["process_open_fds"])

    @property
    def blocks_used(self) -> int:
        return int(self.total(names.KV_BLOCKS, 'state="used"'))

    @property
    def num_in_engine(self) -> int:
        """Sequences that run or wait, and requests in the tokenizer."""
        return int(sum(map(self.total, (names.REQUESTS_RUNNING, names.REQUESTS_WAITING, names.TOKENIZE_QUEUE_DEPTH))))

    @property
    def label_values(self) -> set[tuple[str, str]]:
        """All that labels say, but the bounds of buckets."""
        pairs = {pair for name in self.values for pair in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', name)}
        return {(label, value) for label, value in pairs if label != "le"}


def parse_metrics(page: str) -> dict[str, float]:
    rows = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes] | None = None  # None: not ours
    log_file: Path | None = None

    def get(self, path: str) -> str:
        """Blocks. Raises httpx.HTTPError, also where the answer is no success."""
        answer = httpx.get(self.url + path, timeout=ANSWER_SECONDS, trust_env=False, verify=False)
        return answer.raise_for_status().text

    def sample(self) -> Sample:
        return Sample(time.monotonic(), parse_metrics(self.get("/metrics")), self._num_threads())

    def _num_threads(self) -> int | None:
        if self.process is None:
            return None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("Threads:")[2].split()[0])

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.get("/ready")
                return
            except httpx.HTTPError as error:
                has_ended = self.process is not None and self.process.poll() is not None
                if has_ended or time.monotonic() > deadline:
                    log = self.log_file.read_text() if self.log_file is not None else ""
                    raise SystemExit(f"The server at {self.url} does not get ready: {error}\n{log}") from error
                time.sleep(0.05)

    def stop(self) -> list[str]:
        """Ends a process of ours: a sentence for each thing that is wrong with how it ended."""
        if self.process is None or self.log_file is None:
            return []
        self.process.send_signal(signal.SIGTERM)
        exit_code = self.process.wait(STOP_SECONDS)
        found = [] if exit_code == 0 else [f"The server ended with exit code {exit_code}, not 0."]
        # Errors, and whatever is no log line of ours.
        unusual = [line for line in self.log_file.read_text().splitlines() if '"level": "WARNING"' not in line]
        return [*found, f"The server printed unusual lines: {' '.join(unusual)[:2000]}"] if unusual else found


@contextmanager
def started_server() -> Iterator[Server]:
    flags = ("--port", str(port := free_port()), "--log-format", "json", "--log-level", "warning", *FLAGS)
    command = [sys.executable, "-m", "oaiserve", "serve", "demo", *flags]
    # The clients need cores, too, and threads of one operation that wait for each other would take them.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "log"
        with (
            log_file.open("wb") as log,
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as process,
        ):
            try:
                server = Server(f"http://127.0.0.1:{port}", process, log_file)
                server.wait_until_ready()
                yield server
            finally:
                process.kill()
