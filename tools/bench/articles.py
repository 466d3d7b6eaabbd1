"""The experiments of five articles on a streaming engine for GPT-2, with ours: python -m tools.bench.articles

Each setting is measured by `oaiserve bench run --target engine` in a process of its own, with GPT-2's shape and random
weights, whose tokenizer has a token for each byte. Hand-overs are counted, not timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

from tools.load import run_in_process
from tools.markdown import add_publishing, as_markdown, number, publish, results_of

Options = Mapping[str, Any]

COUNTED_STREAMS = ((1, 1), (64, 1), (64, 8))  # numbers of streams, with the --stream-interval of each
COUNTED_TOKENS = 64
MOST_ON_CPU = 96  # requests at once; the articles' 256 take a CPU minutes for each setting
ARTICLE = "the article"


class Experiment(NamedTuple):
    """One load with several settings, and what a table shows of it."""

    title: str
    load: Options
    settings: Mapping[str, Options]
    columns: Mapping[str, str]  # by title, the name in the report's summary
    article: Mapping[str, Mapping[str, str]]  # the article's figures, by setting and title of a column
    has_long_prompts: bool = False


SUBMIT = {"submit wall, ms": "submit_wall", "submit p99, ms": "submit_p99"}
RATE = {"tokens/s": "completion_tokens_per_second"}
NO_WORKERS = {"--tokenize-workers": 0}
EXPERIMENTS = {
    "burst": Experiment(
        f"256 long prompts at once ({MOST_ON_CPU} on a CPU), one new token each",
        {"--num-requests": 256, "--max-new-tokens": 1, "--max-batch-size": 64, "--prefill-max-batch-size": 16},
        {
            "0 workers": NO_WORKERS,
            "4 workers": {"--tokenize-workers": 4},
            "0 workers, pretok": NO_WORKERS | {"--pretok": None},
        },
        SUBMIT | {"tokenize p50, ms": "phase_tokenize_p50", "TTFT p50, ms": "ttft_p50"},
        {
            "0 workers": {"submit wall, ms": "79", "submit p99, ms": "0.35"},
            "4 workers": {"submit wall, ms": "30", "submit p99, ms": "0.05"},
        },
        has_long_prompts=True,
    ),
    "paced": Experiment(
        "64 requests of 128 tokens, one every 20 ms",
        {"--num-requests": 64, "--max-new-tokens": 128, "--max-batch-size": 64, "--submit-interval-ms": 20},
        {"interval 1": {"--stream-interval": 1}, "interval 8": {"--stream-interval": 8}},
        {"submit lag p99, ms": "send_lag_p99", "TPOT p50, ms": "tpot_p50", "ITL p50, ms": "itl_p50"} | RATE,
        {"interval 8": {"TPOT p50, ms": "21", "ITL p50, ms": "22.6", "tokens/s": "2,150"}},
    ),
    "parts": Experiment(
        f"256 requests of 64 tokens at once ({MOST_ON_CPU} on a CPU), few prompts admitted per step",
        {"--num-requests": 256, "--max-new-tokens": 64, "--max-batch-size": 64},
        {"16 a step": {"--prefill-max-batch-size": 16}, "4 a step": {"--prefill-max-batch-size": 4}},
        SUBMIT
        | {"tokenize p50, ms": "phase_tokenize_p50", "queue p50, ms": "phase_queue_p50"}
        | {"prefill p50, ms": "phase_prefill_p50", "TTFT p50, ms": "ttft_p50", "TPOT p50, ms": "tpot_p50"}
        | RATE,
        {
            "16 a step": {
                "submit wall, ms": "23.5",
                "submit p99, ms": "0.09",
                "queue p50, ms": "405",
                "prefill p50, ms": "10",
                "TPOT p50, ms": "19.6",
                "tokens/s": "9,595",
            }
        },
    ),
}


class Model(NamedTuple):
    name: str
    path: str
    prompt: str  # some 256 of it are a long prompt


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {"device": arguments.device, "runs": [], "counts": []}
    for name in arguments.models:
        with model_of(name, quick=arguments.quick) as model:
            for key in EXPERIMENTS:
                results["runs"] += _runs(key, model, arguments)
            results["counts"] += _counts(model, arguments)
    return results


@contextmanager
def model_of(name: str, *, quick: bool) -> Iterator[Model]:
    """Yield a model to measure: the demo model, or one with random weights, which exists in the block."""
    if name == "demo":
        yield Model("demo", name, "Hello ")
        return
    import torch

    from tools.gpu.sections import Target
    from tools.gpu.workload import files_of

    with files_of(name, Target(torch.device("cpu"), quick)) as files:
        yield Model(name, files.folder, "H")


def _runs(key: str, model: Model, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    experiment = EXPERIMENTS[key]
    options = {"--device": arguments.device, "--prompt": model.prompt, "--unique-prompts": None} | experiment.load
    options |= {"--no-stop-on-eos": None, "--no-prefix-cache": None, "--repeat-runs": arguments.repeats}
    if arguments.device == "cpu":
        options["--num-requests"] = min(MOST_ON_CPU, experiment.load["--num-requests"])
    if experiment.has_long_prompts:
        options["--prompt-repeats"] = 256
    if arguments.quick:
        options |= {"--num-requests": 2, "--max-new-tokens": 2, "--warmup-runs": 0, "--submit-interval-ms": 1}
    for setting, further in experiment.settings.items():
        print(f"{model.name}: {experiment.title}, {setting}", file=sys.stderr)
        point = run_in_process(model.path, options | further)
        yield {"experiment": key, "model": model.name, "setting": setting, "summary": point["summary"]}


def _counts(model: Model, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Count the locks that handing over streams takes, in a process of its own, and yield the counts."""
    print(f"{model.name}: hand-overs, counted", file=sys.stderr)
    command = [sys.executable, "-m", "tools.bench.articles", "--device", arguments.device, "--count", model.path]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        yield {"model": model.name} | json.loads(line)


def count(path: str, device: str) -> None:
    from oaiserve.engine.engine import Engine
    from oaiserve.engine.request import Request, SamplingParams, TextPrompt
    from tools.bench.counted import count_hand_overs

    params = SamplingParams(max_tokens=COUNTED_TOKENS, temperature=0.0, ignore_eos=True)
    for num_streams, interval in COUNTED_STREAMS:
        prompts = [TextPrompt(f"{index}: Hello") for index in range(num_streams)]
        requests = [
            Request(f"{index}", (prompt,), params, stream_interval=interval) for index, prompt in enumerate(prompts)
        ]
        counted = count_hand_overs(lambda: Engine.from_pretrained(path, device=device, drafts="off"), requests)
        print(json.dumps({"streams": num_streams, "interval": interval} | asdict(counted)), flush=True)


def report(results: dict[str, Any]) -> str:
    lines = []
    for key, experiment in EXPERIMENTS.items():
        rows = [["model", "setting", *experiment.columns]]
        for run in results["runs"]:
            if run["experiment"] == key:
                rows.append([run["model"], run["setting"], *_shown(run["summary"], experiment.columns)])
        for setting, figures in experiment.article.items():
            rows.append([ARTICLE, setting, *(figures.get(title, "") for title in experiment.columns)])
        lines += ["", f"{experiment.title}:", "", *as_markdown(rows)]
    per_step = {"tokens": "num_tokens", "hand-overs": "hand_overs", "wake-ups": "wake_ups"}
    per_request = {"locks": "locks", "queue puts": "queue_puts", "queue gets": "queue_gets"}
    of_steps = [f"{title} per step" for title in per_step]
    rows = [["model", "streams", "interval", *of_steps, *(f"{title} per request" for title in per_request)]]
    for counted in results["counts"]:
        row = [counted["model"], f"{counted['streams']}", f"{counted['interval']}"]
        row += [number(counted[name] / counted["num_steps"]) for name in per_step.values()]
        row += [number(counted[name] / counted["streams"]) for name in per_request.values()]
        rows.append(row)
    title = f"The engine thread while an event loop reads streams of {COUNTED_TOKENS} tokens, counted:"
    return "\n".join([f"Device: {results['device']}.", *lines, "", title, "", *as_markdown(rows)])


def _shown(summary: Mapping[str, Any], columns: Mapping[str, str]) -> Iterator[str]:
    for title, name in columns.items():
        if name in summary:
            mean = summary[name]["mean"]
            yield number(mean * 1e3 if title.endswith(", ms") else mean)
        else:  # nothing of it was measured: a single token has no TPOT
            yield ""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"), help="default: cpu")
    add("--models", nargs="+", default=["gpt2-124m"], help="shapes of the GPU check, or demo (default: gpt2-124m)")
    add("--repeats", type=int, default=1, help="measured runs of each setting, after a warm-up (default 1)")
    add("--quick", action="store_true", help="a dry run, whose figures mean nothing")
    add("--count", metavar="MODEL", help=argparse.SUPPRESS)  # in a process of its own
    add_publishing(parser, "articles-DEVICE")
    arguments = parser.parse_args(argv)
    if arguments.count:
        count(arguments.count, arguments.device)
        return
    results = results_of(arguments, measure)
    publish(arguments, f"articles-{results['device']}", results, report(results))


if __name__ == "__main__":
    main()
