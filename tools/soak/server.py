"""The server under soak: started, sampled once a second, and stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
SHORT_OF_FILES = "Cannot accept connections ([Errno 24] Too many open files)"  # a fault of the soak brings this about
ANSWER_SECONDS = 300
NO_LABELS: Labels = frozenset()


@dataclass(frozen=True)
class Sample:
    """The server at one moment, by its page of metrics, and the threads of its process where we have started it."""

    at_seconds: float
    values: Metrics  # of the whole page; empty where only the figures below are kept
    num_threads: int | None
    rss_mib: float
    num_fds: int
    num_series: int
    label_values: frozenset[tuple[str, str]]  # all labels with their values, without the bounds of buckets
    num_running: int  # sequences, as the next one
    num_waiting: int
    num_in_engine: int  # sequences that run or wait, and requests in the tokenizer
    blocks_used: int

    @classmethod
    def of(cls, at_seconds: float, values: Metrics, num_threads: int | None = None) -> Sample:
        gauges = names.ENGINE["num_running"], names.ENGINE["num_waiting"], names.ENGINE["num_tokenizing"]
        in_engine = [int(_total(values, gauge)) for gauge in gauges]
        return cls(
            at_seconds,
            values,
            num_threads,
            rss_mib=values["process_resident_memory_bytes", NO_LABELS] / 2**20,
            num_fds=int(values["process_open_fds", NO_LABELS]),
            num_series=len(values),
            label_values=frozenset(label for _, labels in values for label in labels if label[0] != "le"),
            num_running=in_engine[0],
            num_waiting=in_engine[1],
            num_in_engine=sum(in_engine),
            blocks_used=int(_total(values, names.KV_BLOCKS, state="used")),
        )

    def total(self, metric: names.Metric, **labels: str) -> float:
        """Return the sum over the series of the metric that have these labels."""
        return _total(self.values, metric, **labels)

    def figures_only(self) -> Sample:
        """Return the sample without its page: of an hour, the pages would take gigabytes."""
        return replace(self, values={})


def _total(values: Metrics, metric: names.Metric, **labels: str) -> float:
    return sum(v for (name, found), v in values.items() if name == metric.name and found.issuperset(labels.items()))


@dataclass
class SoakServer:
    url: str
    process: ServerProcess | None = None  # None: it was running before

    def sample(self) -> Sample:
        """Read the metrics now. Raises httpx.HTTPError."""
        answer = httpx.get(f"{self.url}/metrics", timeout=ANSWER_SECONDS, trust_env=False, verify=False)
        return Sample.of(time.monotonic(), parse_metrics(answer.raise_for_status().text), self._num_threads())

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
        unusual = [line for line in lines if '"level": "WARNING"' not in line and SHORT_OF_FILES not in line]
        return [*found, f"The server printed unusual lines: {' '.join(unusual)[:2000]}"] if unusual else found


@contextmanager
def started_server(*more_flags: str, variables: Mapping[str, str] | None = None) -> Iterator[SoakServer]:
    """Start a server, with more flags, and these environment variables besides those of this process."""
    # The clients need cores, too, and threads of one operation that wait for each other would take them.
    with running_oaiserve(
        *FLAGS, *more_flags, env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(variables or {})
    ) as process:
        yield SoakServer(process.url, process)
