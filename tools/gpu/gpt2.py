"""Measures GPT-2 124M in the engine in process, as `oaiserve bench run --target engine` does, with three loads: many
answers at once, streams that begin one after the other, and prompts with one new token."""

from __future__ import annotations

import json
import random
import string
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.arrivals import Arrivals
from loadtest.engine_experiment import EngineExperiment
from loadtest.engine_target import EngineRun, EngineTarget
from loadtest.measure import parse_slos
from loadtest.prompts import Workload
from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.start.started import Started, assemble
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.runtime import THREADS
from tests.models.decoders import byte_tokenizer, real_shape
from tools.gpu.models import described_on
from tools.gpu.parts import Found, in_turn
from tools.gpu.sections import Target
from tools.gpu.steps import UTILIZATION, step_figures
from tools.gpu.workload import blocks_for, started

MODEL = "gpt2-124m"
MOST_TOKENS = 260  # tokens of a prompt and its answer
REPEATS = 3
# Medians of runs, in seconds unless the name says otherwise.
FIGURES = {
    "completion_tokens_per_second": "output_tokens_per_second",
    "submit_wall": "submit_wall",
    "submit_p99": "submit_p99",
    "phase_queue_p50": "queue_p50",
    "phase_prefill_p50": "prefill_p50",
    "ttft_p50": "ttft_p50",
    "ttft_p99": "ttft_p99",
    "tpot_p50": "tpot_p50",
    "itl_p50": "itl_p50",
    "itl_p99": "itl_p99",
}


@dataclass(frozen=True, slots=True)
class Load:
    requests: int
    new_tokens: int
    interval_ms: float = 0.0
    stream_interval: int = 1
    workers: int = 2  # threads that tokenize
    prompt_tokens: int = 16
    repeats: int = REPEATS


def loads(*, quick: bool) -> dict[str, Load]:
    many, some = (8, 4) if quick else (256, 64)
    return {
        "at once": Load(many, 8 if quick else 64),
        "every 20 ms": Load(some, 8 if quick else 128, interval_ms=20.0, stream_interval=8, repeats=1),
        "one token, 0 workers": Load(many, 1, workers=0, prompt_tokens=259),
        "one token, 4 workers": Load(many, 1, workers=4, prompt_tokens=259),
    }


def run(target: Target) -> Iterator[Found]:
    batch, prefills = (4, 2) if target.quick else (64, 16)
    described = described_on(real_shape(MODEL, tiny=target.quick), target.device)
    options = EngineOptions(
        compile=not described.spec.is_on_cpu,
        max_running=batch,
        prefill_max_requests=prefills,
        kv_blocks=blocks_for(batch, MOST_TOKENS),
        max_waiting=1024,
        prefix_cache=False,
        gpu_memory_utilization=UTILIZATION,
    )
    made = started(described, options, target)
    yield {"batch": batch, "prefills_a_step": prefills}
    found: Found = {}

    def part(name: str, load: Load) -> Iterator[Found]:
        found[name] = measured(made, options, load, target)
        yield {"loads": found}

    yield from in_turn({name: partial(part, name, load) for name, load in loads(quick=target.quick).items()})


def measured(made: Started, options: EngineOptions, load: Load, target: Target) -> dict[str, Any]:
    vocab_size = made.spec.vocab_size
    options = replace(options, tokenize_workers=load.workers)
    arrivals = Arrivals(arrival="at-once")
    if load.interval_ms:
        arrivals = Arrivals(arrival="constant", rate=1000 / load.interval_ms)
    served = assemble(made, Tokenizer(byte_tokenizer(vocab_size)), options, THREADS)
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(EngineParts.of(served, options)) as engine,
    ):
        texts = Path(folder) / "texts.jsonl"
        write_texts(texts, load)
        workload = Workload(
            num_requests=load.requests,
            max_new_tokens=str(load.new_tokens),
            stop_on_eos=False,
            requests=texts,
        )
        asked = EngineRun(
            max_batch_size=options.max_running,
            submit_interval_ms=load.interval_ms,
            stream_interval=load.stream_interval,
            tokenize_workers=load.workers,
        )
        experiment = EngineExperiment(EngineTarget(engine, workload, asked), workload, asked, parse_slos(None), {})
        with target.turn():
            point = experiment.run_point(arrivals, 1 if target.quick else load.repeats, "")
        records = engine.take_steps()
    summary = point["summary"]
    found = {own: summary[name]["mean"] for name, own in FIGURES.items() if name in summary}
    found |= {"requests": load.requests, "new_tokens": load.new_tokens, "client": point["verdict"]}
    if load.new_tokens > 1 and not load.interval_ms:
        found["steps"] = step_figures(records, options.max_running)
    return found


def write_texts(path: Path, load: Load) -> None:
    """Write requests whose prompts have a token for each of their letters."""
    generator = random.Random(0)
    texts = ("".join(generator.choices(string.ascii_letters, k=load.prompt_tokens)) for _ in range(load.requests))
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
