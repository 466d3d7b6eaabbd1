"""Runs whole models in native code on emulated CPUs of aarch64, and compares answers with x86's: python -m tools.arm

Python, torch and this project's wheel for aarch64 are prepared in build/arm, the first time from Debian's packages and
the package index. Each variant of the native code runs on an emulated CPU that has its instructions. Answers are
greedy, and compared token by token: they may differ only where two tokens tie, with log-probabilities up to 0.1 apart.
Takes ten minutes or more for a model. It ends with 1 if an answer differs by more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from oaiserve.checkpoints import demo
from oaiserve.config import CpuFeatures
from tools.arm import comparison, environment
from tools.arm.comparison import Position

# The emulated CPU for each variant. torch 2.10 needs the atomic instructions of ARMv8.1, which a Cortex-A53 lacks.
CPUS = {"aarch64": "neoverse-n1", "aarch64-dotprod": "neoverse-n1", "aarch64-i8mm-bf16": "max"}
PROGRAM = str(Path(__file__).with_name("answers.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="*", help="folders or GGUF files (default: the demo model)")
    add("--variants", nargs="+", default=[*CPUS], choices=CPUS, help="variants of native code")
    add("--tokens", type=int, default=16, help="tokens of each answer (default: 16)")
    add(
        "--cpu-features",
        default="native",
        choices=get_args(CpuFeatures),
        help="instructions of x86 that the answers compared with use, as the server's (default: native)",
    )
    arguments = parser.parse_args()
    models = [Path(model).resolve() for model in arguments.models] or [demo.fetched()]
    for model in models:
        if not model.exists():
            sys.exit(f"There is no model at {model}.")
    environment.prepare()
    limits = ["--tokens", str(arguments.tokens)]
    faults = 0
    for model in models:
        for variant in arguments.variants:
            began = time.monotonic()
            actual = emulated(model, variant, limits)
            expected = on_this_machine(
                model, [*limits, "--dtype", actual["dtype"], "--cpu-features", arguments.cpu_features]
            )
            faults += report(f"{model.name}, {variant}", expected, actual, time.monotonic() - began)
    return int(faults > 0)


def emulated(model: Path, variant: str, limits: Sequence[str]) -> dict[str, Any]:
    # No variant starts from what another has stored.
    cache = environment.FOLDER / f"cache/{variant}"
    cache.mkdir(parents=True, exist_ok=True)
    cache.chmod(0o700)
    output = environment.FOLDER / f"{model.name}-{variant}.json"
    program = [PROGRAM, str(model), str(output), *limits, "--variant", variant]
    command = environment.command(CPUS[variant], *program, variables={"OAISERVE_CACHE": str(cache)})
    return answers(command, output, dict(os.environ))


def on_this_machine(model: Path, limits: Sequence[str]) -> dict[str, Any]:
    output = environment.FOLDER / f"{model.name}-x86.json"
    command = [sys.executable, PROGRAM, str(model), str(output), *limits]
    return answers(command, output, os.environ | {"PYTHONPATH": str(environment.ROOT)})


def answers(command: Sequence[str], output: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Run the program that writes answers, and read them. Its errors end this program, too."""
    output.unlink(missing_ok=True)
    done = subprocess.run(command, env=variables, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"'{' '.join(command)}' ended with {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def report(name: str, expected: dict[str, Any], actual: dict[str, Any], seconds: float) -> int:
    """Print how far the answers agree, and return the number of faults."""
    if actual["machine"] != "aarch64":
        raise RuntimeError(f"The answers of {name} are from {actual['machine']}.")
    pairs = zip(expected["answers"], actual["answers"], strict=True)
    compared = [comparison.compare(positions(theirs), positions(ours)) for theirs, ours in pairs]
    faults = [f"answer {number}: {one.fault}" for number, one in enumerate(compared) if one.fault is not None]
    num_equal = sum(one.num_equal for one in compared)
    num_tokens = sum(one.num_tokens for one in compared)
    print(
        f"{name}, {actual['dtype']}: {'DIFFERS' if faults else 'equal up to ties'}. {num_equal} of {num_tokens} tokens "
        f"are equal, {sum(one.is_tie for one in compared)} of {len(compared)} answers end in a tie, log-probabilities "
        f"differ by up to {max(one.max_difference for one in compared):.3f}. {seconds:.0f} s, of which "
        f"{actual['cpu_seconds']:.0f} s of CPU emulated, {actual['load_cpu_seconds']:.0f} s until the model was loaded."
    )
    for fault in faults:
        print(f"  {fault}")
    sys.stdout.flush()
    return len(faults)


def positions(answer: list[Any]) -> list[Position]:
    return [Position(token_id, dict(logprobs)) for token_id, logprobs in answer]


if __name__ == "__main__":
    sys.exit(main())
