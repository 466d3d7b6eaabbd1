"""Loads for a running server: streams from this process, or `oaiserve bench run` in another one."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx


@dataclass(frozen=True)
class StreamsLoad:
    """Streams that begin at once, with random prompts and answers of full length."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int

    def run(self, url: str, seed: int) -> StreamsResult:
        return asyncio.run(self._run(url, random.Random(seed)))

    async def _run(self, url: str, rng: random.Random) -> StreamsResult:
        prompts = [[rng.randrange(100, 40_000) for _ in range(self.prompt_tokens)] for _ in range(self.num_requests)]
        gaps: list[float] = []
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
            started = time.perf_counter()
            await asyncio.gather(*(self._stream(client, prompt, gaps) for prompt in prompts))
            seconds = time.perf_counter() - started
        p99 = statistics.quantiles(gaps, n=100)[98] if len(gaps) > 1 else 0.0
        return StreamsResult(self.num_requests * self.output_tokens / seconds, p99)

    async def _stream(self, client: httpx.AsyncClient, prompt: list[int], gaps: list[float]) -> None:
        body: dict[str, Any] = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        last: float | None = None
        received = 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now
                if '"usage":{' in line:
                    received = json.loads(line[6:])["usage"]["completion_tokens"]
        assert received == self.output_tokens, f"{received} tokens instead of {self.output_tokens}"


@dataclass(frozen=True)
class StreamsResult:
    tokens_per_second: float  # from the first request sent to the last byte read
    itl_p99_seconds: float


def run_bench(url: str, options: dict[str, Any], *flags: str) -> dict[str, Any]:
    """Run `oaiserve bench run` and return the point of its report. Ends the program if requests failed."""
    words = [str(word) for option in options.items() for word in option]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "loadtest", "run", "--url", url, "--json", str(report), "--no-calibrate"]
        subprocess.run([*command, *flags, *words], check=True, stdout=subprocess.DEVNULL)
        (point,) = json.loads(report.read_text())["points"]
    if errors := point["runs"][0]["metrics"]["errors"]:
        sys.exit(f"Requests failed: {errors}")
    return point  # type: ignore[no-any-return]
