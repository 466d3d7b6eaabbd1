"""Defines the six workloads and their goals. Prompts are random, answers greedy, of full length and streamed."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Workload:
    """A load in which `concurrency` requests run at any time, or requests come at a `rate` (requests/s, Poisson)."""

    name: str
    title: str
    num_requests: int
    num_short: int  # requests in the short form
    input_len: int  # tokens, without the common prefix
    output_len: int
    prefix_len: int = 0
    concurrency: int | None = None
    rate: float | None = None

    def short(self) -> Workload:
        return replace(self, num_requests=self.num_short)

    def seed(self, round_number: int) -> int:
        """Return the seed of the prompts: the same for all servers, and new in each round, so that none is cached."""
        return 1000 * int(self.name[1:]) + round_number


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "one client, 128 in, 128 out", 16, 4, 128, 128, concurrency=1),
        Workload("W2", "64 at once, 128 in, 128 out", 64, 64, 128, 128, concurrency=64),
        Workload("W3", "64 at once, shared 512 + 32 in, 32 out", 64, 64, 32, 32, prefix_len=512, concurrency=64),
        Workload("W4", "2.3 a second, Poisson, 256 in, 64 out", 96, 24, 256, 64, rate=2.3),
        Workload("W5", "4 at a time, 1,536 in, 16 out", 8, 4, 1536, 16, concurrency=4),
        Workload("W6", "256 at once, 259 in, 1 out", 256, 64, 259, 1, concurrency=256),
    )
}


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that servers are compared by."""

    title: str
    unit: str
    key: str  # in a run, or in the server's own figures where there is no workload
    workload: str | None = None
    more_is_better: bool = False
    goal: float | None = None  # ratio to the best peer: the least if more is better, else the most
    limit: float | None = None  # for the figure itself, likewise


MEASURES = (
    Measure("output", "tokens/s", "output_throughput", "W1", True, 1.25),
    Measure("output", "tokens/s", "output_throughput", "W2", True, 2.6),
    Measure("output", "tokens/s", "output_throughput", "W3", True, 2.7),
    Measure("TTFT p50", "ms", "ttft_p50_ms", "W3", goal=0.5),
    Measure("TTFT p99", "ms", "ttft_p99_ms", "W4", goal=0.5),
    Measure("ITL p99", "ms", "itl_p99_ms", "W4", goal=0.5),
    Measure("in and out", "tokens/s", "total_throughput", "W5", True, 2.5),
    Measure("ITL p99", "ms", "itl_p99_ms", "W5", goal=0.3),
    Measure("in and out", "tokens/s", "total_throughput", "W6", True, 2.2),
    Measure("TTFT p50", "ms", "ttft_p50_ms", "W6", goal=0.7),
    Measure("first start to first answer", "s", "first_start_seconds", limit=6),
    Measure("later start to first answer", "s", "start_seconds", limit=2),
    Measure("most memory (RSS)", "MiB", "peak_rss_mib", limit=1638),
)
