"""Measures streams over HTTP: a server with front ends, and clients that read as cheaply as they can."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.models.decoders import byte_tokenizer, random_model, real_shape
from tools.engine_load import percentile
from tools.front_ends import read_streams
from tools.gpu.target import Target
from tools.server_process import running_oaiserve

log = logging.getLogger(__name__)

MODEL = "gpt2-124m"
START_LIMIT_SECONDS = 100.0


def run(target: Target) -> Iterator[dict[str, Any]]:
    count, num_tokens, front_ends = (4, 8, 1) if target.quick else (256, 256, 4)
    config = real_shape(MODEL, tiny=target.quick)
    with tempfile.TemporaryDirectory() as folder:
        random_model(config, dtype=torch.bfloat16).save_pretrained(folder)
        byte_tokenizer(config.vocab_size).save_pretrained(folder)
        flags = ["--device", target.device.type, "--front-ends", str(front_ends), "--max-running", str(count)]
        flags += ["--max-connections-per-address", "0", "--log-level", "warning"]
        log_file = Path(folder) / "server.log"
        with running_oaiserve(
            *flags, model=folder, log_file=log_file, start_limit_seconds=START_LIMIT_SECONDS
        ) as server:
            for _ in range(2):  # the first is the warm-up
                streams = asyncio.run(read_streams(server.url, count, num_tokens))
            began = min(stream.begun_ns for stream in streams)
            seconds = (max(stream.read_ns[-1] for stream in streams) - began) / 1e9
            gaps = [
                (later - earlier) / 1e6
                for stream in streams
                for earlier, later in zip(stream.read_ns, stream.read_ns[1:], strict=False)
            ]
            gaps = gaps or [0.0]  # each stream came in one read, as few tokens may
            yield {
                "streams": {
                    "streams": count,
                    "front_ends": front_ends,
                    "tokens_each": num_tokens,
                    "start_seconds": server.start_seconds,
                    "output_tokens_per_second": count * num_tokens / seconds,
                    "ttft_p99_ms": percentile([(s.read_ns[0] - s.begun_ns) / 1e6 for s in streams], 0.99),
                    "read_gap_p50_ms": percentile(gaps, 0.5),
                    "read_gap_p99_ms": percentile(gaps, 0.99),
                }
            }
