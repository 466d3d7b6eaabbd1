"""Runs the load generator that all servers get, which is a third party's: `vllm bench serve`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oaiserve.files import demo
from tools.bench import prepare
from tools.bench.process_usage import cpu_seconds, machine_cpu_seconds
from tools.bench.workloads import Workload
from tools.server_process import ServerProcess

# The share of a run's requests that may be missing. Some servers drop a connection now and then; the rates count only
# what came, and the table shows how much is missing.
MOST_MISSING = 0.25
LIMIT_SECONDS = 600  # of a run; a longer one is not repeated
_FIGURES = {"output_throughput": "output_throughput", "total_token_throughput": "total_throughput"}


class RunFailed(Exception):
    pass


@contextmanager
def load_generator() -> Iterator[LoadGenerator]:
    """Run a process in vLLM's environment that does one run after the other."""
    command = [str(prepare.vllm() / "bin/python"), "-u", str(Path(__file__).with_name("vllm_client.py"))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        generator = LoadGenerator(process)
        generator.read()  # it is ready
        try:
            yield generator
        finally:
            process.terminate()


class LoadGenerator:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, server: ServerProcess, workload: Workload, seed: int) -> dict[str, Any]:
        """Return the figures of one run, in ms where a key says so. Raises RunFailed."""
        with tempfile.TemporaryDirectory() as folder:
            log, result = Path(folder) / "log", Path(folder) / "result.json"
            argv = arguments(workload, seed, server.url, result)
            before = (time.monotonic(), cpu_seconds(server.process.pid), machine_cpu_seconds())
            job = {"argv": argv, "log": str(log), "limit_seconds": LIMIT_SECONDS}
            print(json.dumps(job), file=self._process.stdin, flush=True)
            done = self.read()
            after = (time.monotonic(), cpu_seconds(server.process.pid), machine_cpu_seconds())
            if done["exit_code"] == -signal.SIGALRM:
                raise RunFailed(f"not finished within {LIMIT_SECONDS} s")
            if done["exit_code"] != 0 or not result.exists():
                raise RunFailed(f"the client failed: {log.read_text(errors='replace')[-300:].strip()}")
            figures = read_result(json.loads(result.read_text()), workload)
        took, server_seconds, machine_seconds = (b - a for a, b in zip(before, after, strict=True))
        return figures | {  # averages over the run
            "server_cores": round(server_seconds / took, 3),
            "client_cores": round(done["cpu_seconds"] / took, 3),
            "other_cores": round((machine_seconds - server_seconds - done["cpu_seconds"]) / took, 3),
        }

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"The load generator, {self._process.args}, has ended.")
        answer: dict[str, Any] = json.loads(line)
        return answer


def arguments(workload: Workload, seed: int, url: str, result: Path) -> list[str]:
    """Return the arguments of `vllm bench serve`."""
    options = {
        "--backend": "openai",
        "--endpoint": "/v1/completions",
        "--base-url": url,
        "--model": demo.NAME,
        "--tokenizer": demo.resolve(),
        "--dataset-name": "random",
        "--random-input-len": workload.input_len,
        "--random-output-len": workload.output_len,
        "--random-prefix-len": workload.prefix_len,
        "--num-prompts": workload.num_requests,
        "--seed": seed,
        "--temperature": 0,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,99",
        "--result-dir": result.parent,
        "--result-filename": result.name,
        "--request-rate": "inf" if workload.rate is None else workload.rate,
    }
    if workload.concurrency is not None:
        options["--max-concurrency"] = workload.concurrency
    words = [str(word) for option in options.items() for word in option]
    return [*words, "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]


def read_result(result: dict[str, Any], workload: Workload) -> dict[str, Any]:
    """Return the figures of a result. Raises RunFailed if too many requests are missing."""
    missing_requests = workload.num_requests - result["completed"]
    missing_tokens = workload.num_requests * workload.output_len - result["total_output_tokens"]
    if missing_requests > MOST_MISSING * workload.num_requests:
        reason = next((error.strip() for error in result.get("errors", []) if error), "no reason was given")
        last_line = reason.splitlines()[-1][-200:]  # of a traceback
        raise RunFailed(f"{missing_requests} of {workload.num_requests} requests were not answered: {last_line}")
    figures: dict[str, Any] = {"seconds": round(result["duration"], 3)}
    figures |= {"missing_requests": missing_requests, "missing_tokens": missing_tokens}
    figures |= {ours: round(result[theirs], 2) for theirs, ours in _FIGURES.items()}
    # A single token has no time between tokens, though the client then reports 0.
    for kind in ("ttft", "tpot", "itl", "e2el") if workload.output_len > 1 else ("ttft", "e2el"):
        for percentile in ("p50", "p99"):
            figures[f"{kind}_{percentile}_ms"] = round(result[f"{percentile}_{kind}_ms"], 2)
    return figures
