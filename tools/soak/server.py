"""The server under soak: started, sampled once a second, and stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from loadtest.metrics_page import Labels, Metrics, parse_metrics
from oaiserve.telemetry import names
from tools.server_process import ServerProcess, running_oaiserve

# The KV cache is soon full, so that its pages are touched early, and clients do reach the limits.
FLAGS = (
    *("--dtype", "bfloat16", "--kv-cache-memory", "48MiB", "--max-running", "24", "--max-waiting", "16"),
    *("--write-timeout-seconds", "1", "--log-format", "json", "--log-level", "warning"),
)
ANSWER_SECONDS = 300
NO_LABELS: Labels = frozenset()


@dataclass(frozen=True)
class Sample:
    """The server at one moment: its page of metrics, and the threads of its process where we have started it."""

    at_seconds: float
    values: Metrics
    num_threads: int | None = None

    def total(self, metric: names.Metric, **labels: str) -> float:
        """Return the sum over the series of the metric that have these labels."""
        return sum(
            v for (name, found), v in self.values.items() if name == metric.name and found.issuperset(labels.items())
        )

    @property
    def rss_mib(self) -> float:
        return self.values["process_resident_memory_bytes", NO_LABELS] / 2**20

    @property
    def num_fds(self) -> int:
        return int(self.values["process_open_fds", NO_LABELS])

    @property
    def blocks_used(self) -> int:
        return int(self.total(names.KV_BLOCKS, state="used"))

    @property
    def num_in_engine(self) -> int:
        """The number of sequences that run or wait, and of requests in the tokenizer."""
        return int(sum(map(self.total, (names.REQUESTS_RUNNING, names.REQUESTS_WAITING, names.TOKENIZE_QUEUE_DEPTH))))

    @property
    def label_values(self) -> set[tuple[str, str]]:
        """All labels with their values, without the bounds of buckets."""
        return {label for _, labels in self.values for label in labels if label[0] != "le"}


@dataclass
class SoakServer:
    url: str
    process: ServerProcess | None = None  # None: it was running before

    def sample(self) -> Sample:
        """Read the metrics now. Raises httpx.HTTPError."""
        answer = httpx.get(f"{self.url}/metrics", timeout=ANSWER_SECONDS, trust_env=False, verify=False)
        return Sample(time.monotonic(), parse_metrics(answer.raise_for_status().text), self._num_threads())

    def _num_threads(self) -> int | None:
        if self.process is None:
            return None
        status = Path(f"/proc/{self.process.process.pid}/status").read_text()
        return int(status.partition("Threads:")[2].split()[0])

    def stop(self) -> list[str]:
        """Stop the server if we have started it. Return a sentence for each thing that is wrong with how it ended."""
        if self.process is None:
            return []
        exit_code = self.process.terminate()
        found = [] if exit_code == 0 else [f"The server ended with exit code {exit_code}, not 0."]
        # Errors, and lines that are not of our log.
        lines = self.process.log_file.read_text().splitlines()
        unusual = [line for line in lines if '"level": "WARNING"' not in line]
        return [*found, f"The server printed unusual lines: {' '.join(unusual)[:2000]}"] if unusual else found


@contextmanager
def started_server(*more_flags: str, variables: Mapping[str, str] | None = None) -> Iterator[SoakServer]:
    """Start a server, with more flags, and these environment variables besides those of this process."""
    # The clients need cores, too, and threads of one operation that wait for each other would take them.
    with running_oaiserve(
        *FLAGS, *more_flags, env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(variables or {})
    ) as process:
        yield SoakServer(process.url, process)
