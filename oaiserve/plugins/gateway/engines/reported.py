"""`Reported`: an engine's own metrics, which the gateway reads once a second if the engine has any."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

MOST_SAMPLES = 900  # seconds that are remembered, for requests that wait long
# The numbers by the names of vLLM, SGLang and llama.cpp
_NAMES = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:num_preemptions_total": "preemptions",
    b"vllm:prefix_cache_queries_total": "queried_tokens",
    b"vllm:prefix_cache_hits_total": "hit_tokens",
    b"sglang:num_running_reqs": "running",
    b"sglang:num_queue_reqs": "waiting",
    b"sglang:num_retracted_requests_total": "preemptions",
    b"sglang:prompt_tokens_total": "queried_tokens",
    b"sglang:cached_tokens_total": "hit_tokens",
    b"llamacpp:requests_processing": "running",
    b"llamacpp:requests_deferred": "waiting",
    b"llamacpp:prompt_tokens_total": "computed_tokens",
    b"llamacpp:prompt_tokens_cached_total": "hit_tokens",
}
# SGLang repeats its numbers for each priority of requests; the label of all of them is empty.
_LABELS = rb'(?:\{(?![^\n]*\bpriority="[^"])[^\n]*\})?'
_LINE = re.compile(rb"^(" + b"|".join(map(re.escape, _NAMES)) + rb")" + _LABELS + rb" ([0-9.eE+-]{1,32})", re.MULTILINE)


class Sample(NamedTuple):
    """The numbers of one moment, added up over an engine's parts. None: the engine reports none."""

    at_ns: int
    running: int | None = None
    waiting: int | None = None
    preemptions: int | None = None
    queried_tokens: int | None = None
    hit_tokens: int | None = None


def sample_of(content: bytes, at_ns: int) -> Sample:
    """Read the metrics of an engine, in Prometheus' text format."""
    sums: dict[str, int] = {}
    for name, text in _LINE.findall(content):
        try:
            number = float(text)
        except ValueError:
            continue
        if 0 <= number < 2**53:
            field = _NAMES[name]
            sums[field] = sums.get(field, 0) + int(number)
    computed = sums.pop("computed_tokens", None)
    if computed is not None and "hit_tokens" in sums:
        sums["queried_tokens"] = computed + sums["hit_tokens"]
    return Sample(at_ns, **sums)


class Reported:
    """The last samples of an engine."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    @property
    def last(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    def add(self, sample: Sample) -> None:
        self._samples.append(sample)

    def forget(self) -> None:
        """Forget all samples, because another process may answer from now on."""
        self._samples.clear()

    def said_between(self, since_ns: int, until_ns: int) -> Iterator[str]:
        """Yield what the engine reported between two times, in words."""
        samples = []
        for sample in reversed(self._samples):
            if sample.at_ns < since_ns:
                break
            if sample.at_ns <= until_ns:
                samples.append(sample)
        waiting = max((sample.waiting for sample in samples if sample.waiting), default=0)
        if waiting:
            yield f"the engine reported {waiting:,} waiting"
        counts = [sample.preemptions for sample in samples if sample.preemptions is not None]
        if counts and counts[0] > counts[-1]:
            yield f"the engine preempted {counts[0] - counts[-1]:,} meanwhile"
