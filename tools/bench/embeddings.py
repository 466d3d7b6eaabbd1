"""Measures texts per second against sentence-transformers on a CPU: python -m tools.bench.embeddings

Both have the same models, with random weights in the shapes of published ones, and as many threads. Ours is asked over
HTTP, by one request with all texts; sentence-transformers encodes the same list in its own process, without a server.
They take turns, and in float32 the vectors must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from tools.bench import machine, prepare
from tools.bench.table import spread
from tools.markdown import add_publishing, as_markdown, publish, results_of, write_json
from tools.server_process import exit_on_sigterm, running_oaiserve

LOADS = {"queries": (5, 20), "passages": (60, 200), "of all lengths": (5, 400)}  # words of a text, about as many tokens
NUM_TEXTS = {"queries": 1024, "passages": 256, "of all lengths": 256}
LEAST_COSINE = 0.9999
OURS, PEER = "oaiserve", "sentence-transformers"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=["minilm-l6", "bge-base"], help="of tests/models/poolers.py")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both (default float32)")
    add("--rounds", type=int, default=5, help="default 5")
    add("--quick", action="store_true", help="the smallest model and an eighth of the texts, for a first look")
    add_publishing(parser, "embeddings", after="after each model")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, measure)
    publish(arguments, "embeddings", results, report(results))
    is_same = min(run["least_cosine"] for run in results["runs"]) >= LEAST_COSINE
    return 0 if is_same or results["dtype"] != "float32" else 1


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    models = arguments.models[:1] if arguments.quick else arguments.models
    results: dict[str, Any] = {
        "created": date.today().isoformat(),
        "machine": machine.sentence(),
        "peer": prepare.SENTENCE_TRANSFORMERS,
        "dtype": arguments.dtype,
        "runs": [],
    }
    for name in models:
        folder = model_folder(name)
        threads = len(os.sched_getaffinity(0))
        flags = ("--dtype", arguments.dtype, "--served-model-name", name, "--cpu-threads", str(threads))
        with (
            sentence_transformers(folder, threads, arguments.dtype) as encode,
            running_oaiserve(*flags, model=str(folder)) as server,
            httpx.Client(base_url=server.url, timeout=600, trust_env=False) as http,
        ):
            for load in LOADS:
                share = 8 if arguments.quick else 1
                results["runs"].append(
                    {"model": name, "load": load} | compare(load, share, arguments.rounds, http, encode)
                )
                write_json(arguments.json, results)
    return results


def compare(load: str, share: int, num_rounds: int, http: httpx.Client, encode: Any) -> dict[str, Any]:
    """Return the texts per second of both in each round, which has texts of its own."""
    rates: dict[str, list[float]] = {OURS: [], PEER: []}
    cosines = []
    for place in range(num_rounds + 1):
        texts = texts_of(load, place, NUM_TEXTS[load] // share)
        order = (ours, encode) if place % 2 else (encode, ours)
        found = {way: way(http, texts) if way is ours else way(texts) for way in order}
        cosines.append(least_cosine(found[ours][1], found[encode][1]))
        if place:  # the first one warms up
            for name, way in ((OURS, ours), (PEER, encode)):
                rates[name].append(len(texts) / found[way][0])
    ratios = [a / b for a, b in zip(rates[OURS], rates[PEER], strict=True)]
    return {"texts_per_second": rates, "ratios": ratios, "least_cosine": min(cosines)}


def ours(http: httpx.Client, texts: list[str]) -> tuple[float, np.ndarray]:
    """Return the seconds of one request, and its vectors."""
    began = time.perf_counter()
    answer = http.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
    seconds = time.perf_counter() - began
    answer.raise_for_status()
    rows = [np.frombuffer(b64decode(item["embedding"]), dtype="<f4") for item in answer.json()["data"]]
    return seconds, np.stack(rows)


@contextmanager
def sentence_transformers(folder: Path, threads: int, dtype: str) -> Iterator[Any]:
    """Run sentence-transformers, and yield a function like `ours`."""
    python = prepare.sentence_transformers() / "bin/python"
    script = Path(__file__).with_name("encode_sentence_transformers.py")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    command = [str(python), str(script), str(folder), str(threads), dtype]
    with (
        TemporaryDirectory() as scratch,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("sentence-transformers did not start")
        files = {"texts": f"{scratch}/texts.json", "vectors": f"{scratch}/vectors.npy"}

        def encode(texts: list[str]) -> tuple[float, np.ndarray]:
            Path(files["texts"]).write_text(json.dumps(texts))
            print(json.dumps(files), file=process.stdin, flush=True)
            seconds = float(process.stdout.readline())  # type: ignore[union-attr]
            return seconds, np.load(files["vectors"])

        try:
            yield encode
        finally:
            process.stdin.close()


def model_folder(name: str) -> Path:
    """Return the folder of a model with random weights, which is made once."""
    folder = prepare.FOLDER / "models" / "poolers" / name
    if not (folder / "modules.json").exists():
        from tests.models.poolers import REAL_SHAPES, random_pooler, save

        config = REAL_SHAPES[name]
        folder.mkdir(parents=True, exist_ok=True)
        save(folder, config.model_type, random_pooler(config), pooling="mean")
    return folder


def texts_of(load: str, place: int, number_of_texts: int) -> list[str]:
    """Return texts of words of two and three letters, each of which is a token. No two rounds have the same."""
    rng = random.Random(f"{load} {place}")
    low, high = LOADS[load]

    def word() -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.choice((2, 3))))

    return [" ".join(word() for _ in range(rng.randint(low, high))) for _ in range(number_of_texts)]


def least_cosine(first: np.ndarray, second: np.ndarray) -> float:
    products = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    return float(products.min())


def report(results: dict[str, Any]) -> str:
    rows = [["model", "texts", f"{OURS}, texts/s", f"{PEER}, texts/s", "ratio", "least cosine"]]
    for run in results["runs"]:
        rates = run["texts_per_second"]
        rows.append(
            [
                run["model"],
                run["load"],
                *(spread(rates[name]) for name in (OURS, PEER)),
                f"**{spread(run['ratios'])}**",
                f"{run['least_cosine']:.6f}",
            ]
        )
    head = f"{results['machine']}; {results['peer']}; {results['dtype']}; {results['created']}."
    return "\n".join([head, "Median (least..most) of the rounds.", "", *as_markdown(rows)])


if __name__ == "__main__":
    sys.exit(main())
