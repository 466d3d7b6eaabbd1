"""Measures streams over HTTP, as the processes of the load test read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from loadtest.metrics_page import parse_metrics
from tools.gpu.sections import Target
from tools.gpu.workload import files_of, note_off
from tools.load import run_bench
from tools.server_process import running_oaiserve

FEATURE = "oaiserve_engine_feature"
PROMPT = {"--random-form": "words", "--input-len": 3}


def run(target: Target) -> Iterator[dict[str, Any]]:
    count, num_tokens, clients = (4, 8, 1) if target.quick else (256, 256, 8)
    flags = ["--device", target.device.type, "--max-running", str(count)]
    flags += ["--max-connections-per-address", "0", "--log-level", "warning"]
    load = PROMPT | {"--num-requests": count, "--concurrency": count, "--max-new-tokens": num_tokens}
    with (
        files_of("gpt2-124m", target) as files,
        running_oaiserve(
            *flags, model=files.folder, log_file=Path(files.folder) / "log", start_limit_seconds=140.0
        ) as server,
    ):
        point = run_bench(server.url, load | {"--processes": clients, "--warmup": count}, "--no-stop-on-eos")
        if target.is_gpu:
            page = parse_metrics(httpx.get(f"{server.url}/metrics", timeout=30).text)
            is_on = {dict(labels)["feature"]: on for (name, labels), on in page.items() if name == FEATURE}
            note_off({name: "" if on else "of the server" for name, on in is_on.items()})
    metrics = point["runs"][0]["metrics"]
    figures = {
        f"{kind}_{share}_ms": 1e3 * times[share]
        for kind in ("ttft", "itl")
        if (times := metrics["distributions"][kind]) is not None
        for share in ("p50", "p99")
    }
    yield {
        "streams": {
            "streams": count,
            "tokens_each": num_tokens,
            "start_seconds": server.start_seconds,
            "output_tokens_per_second": metrics["completion_tokens_per_second"],
            **figures,
            "client": point["verdict"],
        }
    }
