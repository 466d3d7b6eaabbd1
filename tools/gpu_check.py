"""One command for whoever has a GPU for ten minutes: is it right, how fast is it, where does a step's time go?

    python -m tools.gpu_check --out DIR                     # the whole picture, on the GPU
    python -m tools.gpu_check --out DIR --device cpu --quick    # a dry run anywhere

Needs torch and transformers, no network and no weights: models have random weights, at the shapes of real ones.
Writes DIR/gpu_check.json, DIR/gpu_check.md and, of the Triton kernels, DIR/kernel_check.json; exits with 1 if an answer
is wrong.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import transformers

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.attention import select_backend
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.load import LoadedModel, prepare, select_device
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampler import sample
from oaiserve.engine.request import TERMINAL, Event, Finished, Request, SamplingParams, TokenPrompt
from oaiserve.engine.sequence import Chunk, Sequence, Step
from oaiserve.engine.tokenize import Tokenizer
from tools.random_models import FAMILIES, REAL_SHAPES, byte_tokenizer, generate, random_model

BLOCK_SIZE = 16
PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12, [11, 40, 11, 40, 11]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json and gpu_check.md")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="the smallest shape, short runs: under a minute on a CPU")
    arguments = parser.parse_args(argv)
    device = select_device(arguments.device)
    shapes = ["smollm2-135m"] if arguments.quick else list(REAL_SHAPES)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": environment(device), "correctness": check_families(device), "shapes": {}}
    report["kernels"] = check_kernels(arguments.out / "kernel_check.json", device, quick=arguments.quick)
    print_progress(f"kernels: {'equal' if report['kernels']['is_correct'] else 'WRONG'}")
    for name in shapes:
        report["shapes"][name] = check_shape(name, device, quick=arguments.quick)
        print_progress(f"{name}: done")
    report["is_correct"] = all(row["equal"] for row in report["correctness"].values())
    report["is_correct"] &= report["kernels"]["is_correct"]
    (arguments.out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    text = as_markdown(report)
    (arguments.out / "gpu_check.md").write_text(text)
    print(text)
    return 0 if report["is_correct"] else 1


def environment(device: torch.device) -> dict[str, str]:
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else f"CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "attention": select_backend(device).__module__.rpartition(".")[2],  # type: ignore[attr-defined]
        "executor": "eager",
    }


def check_families(device: torch.device) -> dict[str, dict[str, Any]]:
    """Every family's small model in float32: the engine's greedy answers, batched and in chunks, against `generate`."""
    torch.backends.cuda.matmul.allow_tf32 = False
    results = {}
    for name, config in FAMILIES.items():
        model = random_model(config, device=device)
        expected = generate(model, PROMPTS, num_tokens=12)
        options = EngineOptions(block_size=4, max_running=8, max_step_tokens=9)
        with make_engine(prepare(model, name), num_blocks=64, options=options) as engine:
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            got = [completion.token_ids for completion in engine.generate(PROMPTS, params)]
        results[name] = {"equal": got == expected, "num_tokens": sum(map(len, expected))}
        print_progress(f"{name}: {'equal' if got == expected else 'DIFFERENT'}")
    return results


def check_kernels(out: Path, device: torch.device, *, quick: bool) -> dict[str, Any]:
    """In a process of its own: a kernel that breaks takes its process's device with it, and on a CPU Triton has to be
    told before anybody imports it."""
    if find_spec("triton") is None:
        return {"is_correct": True, "text": "Triton is not installed: no kernels of ours.\n"}
    command = [sys.executable, "-m", "tools.kernel_check", "--out", str(out), "--device", device.type]
    run = subprocess.run([*command, *(["--quick"] if quick else [])], stdout=subprocess.PIPE, text=True)
    if run.stdout == "":
        return {"is_correct": False, "text": f"tools.kernel_check BROKE with exit code {run.returncode}.\n"}
    return {"is_correct": run.returncode == 0, "text": run.stdout}


def check_shape(name: str, device: torch.device, *, quick: bool) -> dict[str, Any]:
    model = random_model(REAL_SHAPES[name], dtype=torch.bfloat16, device=device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    loaded = prepare(model, name)
    batch_sizes = [1, 8] if quick else [1, 16, 64, 256]
    num_tokens = 16 if quick else 128
    num_blocks = max(batch_sizes) * (-(-(128 + num_tokens) // BLOCK_SIZE) + 1)
    return {
        "parameters": num_parameters,
        "kv_bytes_per_token": loaded.kv_bytes_per_token,
        "throughput": [throughput(loaded, size, num_tokens, num_blocks) for size in batch_sizes],
        "decode_step": [step_breakdown(loaded, size, num_blocks, 1) for size in batch_sizes],
        "prefill_step": [step_breakdown(loaded, 1, num_blocks, 256 if quick else 2048)],
    }


def make_engine(loaded: LoadedModel, *, num_blocks: int, options: EngineOptions) -> Engine:
    return Engine(
        tokenizer=Tokenizer(byte_tokenizer()),
        runner=ModelRunner(
            loaded, num_blocks=num_blocks, block_size=options.block_size, backend=select_backend(loaded.device)
        ),
        num_blocks=num_blocks,
        max_model_len=min(loaded.max_model_len, num_blocks * options.block_size),
        vocab_size=loaded.vocab_size,
        options=options,
    )


def throughput(loaded: LoadedModel, num_requests: int, num_tokens: int, num_blocks: int) -> dict[str, Any]:
    """All requests at once, 128 random tokens in, `num_tokens` out, through the whole engine, after a warm-up."""
    options = EngineOptions(block_size=BLOCK_SIZE, max_running=256, max_step_tokens=2048)
    generator = torch.Generator().manual_seed(0)
    with make_engine(loaded, num_blocks=num_blocks, options=options) as engine:
        for measured in (False, True):
            prompts = torch.randint(0, loaded.vocab_size, (num_requests, 128), generator=generator).tolist()
            tokens = num_tokens if measured else 4
            started = time.perf_counter()
            requests = _submit_all(engine, prompts, tokens)
            seconds = time.perf_counter() - started
    ttft = [request.times.time_to_first_token_ns for request in requests]
    tpot = [request.times.time_per_output_token_ns(tokens) for request in requests]
    return {
        "requests": num_requests,
        "output_tokens_per_second": num_requests * tokens / seconds,
        "ttft_p50_ms": statistics.median(value for value in ttft if value is not None) / 1e6,
        "tpot_p50_ms": statistics.median(value for value in tpot if value is not None) / 1e6,
    }


def _submit_all(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[Request]:
    """All at once, until the last has finished."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = [Request(f"r{i}", (TokenPrompt(prompt),), params) for i, prompt in enumerate(prompts)]
    inbox: SimpleQueue[list[Event]] = SimpleQueue()
    for request in requests:
        engine.submit(request, inbox.put)
    num_open = len(requests)
    while num_open:
        for event in inbox.get():
            if isinstance(event, TERMINAL):
                assert isinstance(event, Finished), event
                assert event.usage.completion_tokens == num_tokens, event
                num_open -= 1
    return requests


@torch.inference_mode()
def step_breakdown(loaded: LoadedModel, num_sequences: int, num_blocks: int, query_len: int) -> dict[str, Any]:
    """Medians over repeated steps of `num_sequences` sequences that have 128 tokens and compute `query_len` more.

    `launch` is the host's part of the forward, `forward` ends when the device has finished.
    """
    context = 128 if query_len == 1 else 0
    blocks_each = -(-(context + query_len) // BLOCK_SIZE)
    num_blocks = max(num_blocks, num_sequences * blocks_each)
    backend = select_backend(loaded.device)
    runner = ModelRunner(loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, backend=backend)
    step = Step()
    for i in range(num_sequences):
        ids = [(i + 7 * j) % loaded.vocab_size for j in range(context + query_len)]
        sequence = Sequence(str(i), 0, ids, SamplingParams(temperature=0.0), max_len=len(ids) + 1)
        sequence.blocks = list(range(i * blocks_each, (i + 1) * blocks_each))
        step.chunks.append(Chunk(sequence, context, query_len))
    sequences = [chunk.sequence for chunk in step.chunks]
    rows: dict[str, list[float]] = {"batch": [], "launch": [], "forward": [], "sample": [], "whole": []}
    for _ in range(12):
        started = time.perf_counter()
        batch = build_batch(step, BLOCK_SIZE, loaded.device)
        built = time.perf_counter()
        logits = runner.forward(batch)
        launched = time.perf_counter()
        _wait(loaded.device)
        computed = time.perf_counter()
        sample(logits, sequences)
        ended = time.perf_counter()
        pairs = {"batch": (started, built), "launch": (built, launched), "forward": (built, computed)}
        for key, (begin, end) in {**pairs, "sample": (computed, ended), "whole": (started, ended)}.items():
            rows[key].append((end - begin) * 1e3)
    medians = {f"{key}_ms": statistics.median(values[2:]) for key, values in rows.items()}
    return {"sequences": num_sequences, "tokens": num_sequences * query_len, **medians}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def as_markdown(report: dict[str, Any]) -> str:
    lines = [", ".join(f"{key} {value}" for key, value in report["environment"].items()), ""]
    same = [name for name, row in report["correctness"].items() if row["equal"]]
    lines += [f"Equal to `generate`, token for token: {', '.join(same) or 'none'}."]
    different = sorted(report["correctness"].keys() - set(same))
    lines += [f"DIFFERENT: {', '.join(different)}."] if different else []
    lines += ["", report["kernels"]["text"].rstrip()]
    for name, shape in report["shapes"].items():
        lines += ["", f"### {name}, {shape['parameters'] / 1e6:,.0f} M parameters, bfloat16, random weights", ""]
        lines += _table(shape["throughput"])
        lines += ["", "A decode step at 128 tokens of context, ms:", "", *_table(shape["decode_step"])]
        lines += ["", "A prefill step, ms:", "", *_table(shape["prefill_step"])]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    head = [key.removesuffix("_ms").replace("_", " ") for key in rows[0]]
    body = [
        " | ".join(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values())
        for row in rows
    ]
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {row} |" for row in body)]


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
