"""The figures of docs/benchmarks.md, measured anew on this machine: python -m tools.figures

Starts `oaiserve serve demo` as a user would, loads it over HTTP, and times `submit` in process. Prints markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import httpx

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Event, Request, SamplingParams, TextPrompt

ROOT = Path(__file__).parent.parent
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
QUESTION = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 8,
    "temperature": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="cold starts to time (default 3)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each load (default 3)")
    arguments = parser.parse_args()
    rows = [("start to first answer", "s", [start_seconds() for _ in range(arguments.starts)])]
    with server() as (url, _):
        for concurrency in (1, 64):
            speeds = [
                asyncio.run(output_tokens_per_second(url, concurrency, seed=concurrency + repeat))
                for repeat in range(arguments.repeats)
            ]
            rows.append((f"output tokens/s, {concurrency} at once", "1/s", speeds))
    for name, gap_seconds in (("back to back", 0.0), ("1 ms apart", 0.001)):
        delays = [submit_p99_us(gap_seconds) for _ in range(arguments.repeats)]
        rows.append((f"submit, p99, {name}", "µs", delays))
    print("| figure | unit | median | least | most |\n|---|---|---|---|---|")
    for name, unit, values in rows:
        print(f"| {name} | {unit} | {statistics.median(values):.1f} | {min(values):.1f} | {max(values):.1f} |")
    print("\n| package | files | lines |\n|---|---|---|")
    for package in ("oaiserve", "oaiserve/engine"):  # what else is in them are packages of their own
        print(package_row(package, (ROOT / package).glob("*")))
    for package in ("oaiserve/routes", "oaiserve/engine/model", "oaiserve/telemetry"):
        print(package_row(package, (ROOT / package).rglob("*")))
    for package in ("loadtest", "deploy", "tools", "tests"):
        print(package_row(package, (ROOT / package).rglob("*")))


def package_row(package: str, found: Iterable[Path]) -> str:
    """Of Python and C++."""
    files = [path for path in found if path.suffix in (".py", ".cpp", ".h")]
    return f"| {package} | {len(files)} | {sum(map(num_lines, files)):,} |"


def num_lines(path: Path) -> int:
    """Lines with something on them, comments and docstrings included."""
    return sum(bool(line.strip()) for line in path.read_text().splitlines())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def server() -> Iterator[tuple[str, float]]:
    """A server process; gives its URL and the seconds from its start to its first answer."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    started = time.monotonic()
    command = [sys.executable, "-m", "oaiserve", "serve", "demo", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=120).raise_for_status()
                break
            except httpx.ConnectError:
                if process.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}") from None
                time.sleep(0.02)
        yield url, time.monotonic() - started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def start_seconds() -> float:
    with server() as (_, seconds):
        return seconds


async def output_tokens_per_second(url: str, concurrency: int, seed: int) -> float:
    """All requests at once, streamed, from the first send to the last byte; tokens as the usage counts them."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        rng = random.Random(seed)  # another one each time, so that the prefix cache has none of it

        async def one() -> int:
            body = {
                "model": "demo",
                "prompt": [rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)],
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            tokens = 0
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and '"usage":{' in line:
                        tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            assert tokens == OUTPUT_TOKENS, f"{tokens} tokens instead of {OUTPUT_TOKENS}"
            return tokens

        await one()  # warm-up
        started = time.perf_counter()
        total = sum(await asyncio.gather(*(one() for _ in range(concurrency))))
        return total / (time.perf_counter() - started)


def submit_p99_us(gap_seconds: float, num_requests: int = 1000) -> float:
    """Submits text prompts one after the other while the engine computes those that came before. With a gap, each one
    has to wake a tokenize worker from its sleep."""
    inbox: SimpleQueue[list[Event]] = SimpleQueue()
    text = "Tell me something about the number " * 8
    params = SamplingParams(max_tokens=1, temperature=0.0)
    requests = [Request(f"r{i}", (TextPrompt(f"{text}{i}"),), params) for i in range(num_requests)]
    took_ns: list[int] = []
    with Engine.from_pretrained("demo", max_waiting=2 * num_requests) as engine:
        for request in requests:
            started = time.monotonic_ns()
            engine.submit(request, inbox.put)
            took_ns.append(time.monotonic_ns() - started)
            if gap_seconds:
                time.sleep(gap_seconds)
        num_open = num_requests
        while num_open:
            num_open -= sum(isinstance(event, TERMINAL) for event in inbox.get())
    return statistics.quantiles(took_ns, n=100)[98] / 1e3


if __name__ == "__main__":
    main()
