"""Images: their first token, the second turn over them, what streams notice, and memory: python -m tools.images

A server of a model with random weights at the shape of SmolVLM-256M, whose images have one tile of 512 x 512 pixels and
64 tokens. --rounds N repeats each measurement. --save FOLDER only saves the model, for other servers; with --url URL,
one of them is measured: its first tokens and images a second.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch

from tests.models.pictures import picture, png
from tools.bench.process_usage import peak_rss_mib
from tools.machine import sentence
from tools.server_process import ServerProcess, exit_on_sigterm, running_oaiserve

STREAM_TOKENS = 400
AT_ONCE = 64
_TEXT = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "vocab_size": 49280,
}  # fmt: skip
_VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 512, "patch_size": 16,
}  # fmt: skip


def save_model(folder: Path) -> None:
    """Save a model at the shape of SmolVLM-256M, in bfloat16."""
    from tests.plugins.media.seeing import KINDS, save_whole  # of a plug-in, which may be missing

    pixels = {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 512}}
    kind = KINDS["smolvlm"]._replace(
        of_images=pixels, settings={"image_seq_len": 64}, config={"scale_factor": 4}, vision=_VISION, text=_TEXT
    )
    save_whole("smolvlm", kind, folder, torch.bfloat16, 0.02)


def body(numbers: list[int], text: str, **more: Any) -> dict[str, Any]:
    images = [f"data:image/png;base64,{base64.b64encode(png(picture(n, 512, 512))).decode()}" for n in numbers]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in images] + [{"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "ignore_eos": True} | more


def times(http: httpx.Client, asked: dict[str, Any]) -> Iterator[float]:
    """Yield the seconds to each chunk of a stream that has content."""
    begun = time.perf_counter()
    with http.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and any(map(is_token, json.loads(line[6:])["choices"])):
                yield time.perf_counter() - begun


def is_token(choice: dict[str, Any]) -> bool:
    return bool(choice.get("finish_reason")) or "role" not in choice["delta"] or bool(choice["delta"].get("content"))


def gaps(http: httpx.Client) -> list[float]:
    at = list(times(http, body([], "Tell me.", max_tokens=STREAM_TOKENS)))
    return [after - before for before, after in pairwise(at)]


def shown(name: str, values: list[float], unit: str, scale: float = 1.0) -> None:
    low, middle, high = (scale * value for value in (min(values), median(values), max(values)))
    print(f"{name}: {middle:.3g} {unit} ({low:.3g} to {high:.3g})")


def measure(rounds: int, url: str, server: ServerProcess | None = None) -> None:
    with httpx.Client(base_url=url, timeout=600) as http, ThreadPoolExecutor(AT_ONCE) as threads:
        for number in range(3):  # so that the cost of steps is known
            list(times(http, body([number], "Hi", max_tokens=64)))
        one, first, again, ratios, p99s, per_second = ([] for _ in range(6))  # type: ignore[var-annotated]
        for number in range(100, 100 + 100 * rounds, 100):
            one.append(next(times(http, body([number + 3], "What is this?", max_tokens=1))))
            three = [number, number + 1, number + 2]
            first.append(next(times(http, body(three, "What is this?", max_tokens=1))))
            again.append(next(times(http, body(three, "What is this? And why?", max_tokens=1))))
            bodies = [body([number + 10 + image], "Hi", max_tokens=1) for image in range(8)]
            begun = time.perf_counter()
            list(threads.map(lambda one: http.post("/v1/chat/completions", json=one).raise_for_status(), bodies))
            per_second.append(8 / (time.perf_counter() - begun))
            if server is None:
                continue
            alone = gaps(http)
            stream = threads.submit(gaps, http)
            while not stream.done():
                number += 1
                http.post("/v1/chat/completions", json=body([number + 50], "Hi", max_tokens=1)).raise_for_status()
            beside = stream.result()
            ratios.append(mean(beside) / mean(alone))
            p99s.append(sorted(beside)[int(0.99 * len(beside))] / sorted(alone)[int(0.99 * len(alone))])
        shown("first token of an image", one, "ms", 1000)
        shown("first token of three images", first, "ms", 1000)
        shown("first token of the second turn over them", again, "ms", 1000)
        shown("of the first turn's", [b / a for a, b in zip(first, again, strict=True)], "")
        shown("images a second", per_second, "")
        if server is None:
            return
        shown("mean ITL of a stream beside images, of that alone", ratios, "")
        shown("its p99, of that alone", p99s, "")
        before = peak_rss_mib(server.process.pid)
        bodies = [body([10_000 + one], "Hi", max_tokens=1) for one in range(AT_ONCE)]
        codes = list(threads.map(lambda one: http.post("/v1/chat/completions", json=one).status_code, bodies))
        peak = peak_rss_mib(server.process.pid)
        print(f"{AT_ONCE} images at once: {codes.count(200)} answered, {peak - before:.0f} MiB more")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--url")
    arguments = parser.parse_args()
    exit_on_sigterm()
    if arguments.save is not None:
        save_model(arguments.save)
        return 0
    print(sentence())
    if arguments.url is not None:
        measure(arguments.rounds, arguments.url)
        return 0
    with TemporaryDirectory() as folder:
        save_model(Path(folder))
        with running_oaiserve("--served-model-name", "random", model=folder) as server:
            measure(arguments.rounds, server.url, server)
    return 0


if __name__ == "__main__":
    sys.exit(main())
