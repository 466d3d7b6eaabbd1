"""Counts what whole models take on aarch64, next to llama.cpp's: python -m tools.bench.instructions.whole MODEL.gguf

Both read the same GGUF file and compute the same prompt and as many tokens after it, on one thread of an emulated CPU,
whose instructions are counted as by `python -m tools.bench.instructions`. Ours are all instructions of the process
between a request and its answer: besides the steps those of Python, of torch and of the engine's other threads. The
peer's are those of its library.

Needs what that command needs except llvm-mca, and prepares what `make test-arm` prepares.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.arm import environment
from tools.arm.__main__ import CPUS
from tools.bench.instructions import __main__ as products
from tools.markdown import add_publishing, as_markdown, publish, results_of

MARKERS = "aarch64-whole"
STEPS = ("decode", "prompt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="a GGUF file")
    add("--variants", nargs="+", default=[*products.CORES], choices=products.CORES, help="of our native code")
    add("--prompt-tokens", type=int, default=32, help="tokens of the prompt (default: 32)")
    add("--answer-tokens", type=int, default=4, help="tokens after the first of the answer (default: 4)")
    add_publishing(parser, MARKERS)
    arguments = parser.parse_args()
    if arguments.show is None and not (arguments.model and arguments.model.is_file()):
        sys.exit(f"This needs a GGUF file, and there is none at {arguments.model}.")
    results = results_of(arguments, measure)
    publish(arguments, MARKERS, results, report(results))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    environment.prepare()
    model = str(arguments.model.resolve())
    num_prompt_tokens = arguments.prompt_tokens
    num_answer_tokens = arguments.answer_tokens
    numbers = [str(num_prompt_tokens), str(num_answer_tokens)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plugin = ["-plugin", f"{products.build_counter(Path(folder))},loads=off"]
        for name in arguments.variants:
            peer = products.build_peer_program(
                products.VARIANTS[name], "steps", products.HERE / "peer_steps.cpp", "llama"
            )
            emulator = environment.command(CPUS[name], variables={})[:3]
            _, (prompt, answer) = products.counted([*emulator, *plugin, str(peer), model, *numbers])
            of_peer = {
                "decode": answer.instructions / num_answer_tokens,
                "prompt": prompt.instructions / num_prompt_tokens,
            }
            dtype, (alone, longer) = products.counted(command_of_ours(name, plugin, [model, name, *numbers]))
            of_ours = {
                "decode": (longer.instructions - alone.instructions) / num_answer_tokens,
                "prompt": alone.instructions / num_prompt_tokens,
            }
            for step in STEPS:
                row = {"variant": name, "model": arguments.model.name, "dtype": dtype, "step": step}
                rows.append(row | {"llama.cpp": of_peer[step], "oaiserve": of_ours[step]})
    return {"prompt_tokens": num_prompt_tokens, "answer_tokens": num_answer_tokens, "rows": rows}


def command_of_ours(variant: str, plugin: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the command that answers prompts with the wheel for aarch64."""
    cache = environment.FOLDER / f"cache/{variant}"
    cache.mkdir(parents=True, exist_ok=True)
    cache.chmod(0o700)
    paths = f"{environment.OURS}:{environment.PACKAGES}:{environment.ROOT}"
    variables = {"OAISERVE_CACHE": str(cache), "PYTHONPATH": paths}
    program = str(products.HERE / "our_steps.py")
    emulator, *rest = environment.command(CPUS[variant], program, *arguments, variables=variables)
    return [emulator, *plugin, *rest]


def report(results: dict[str, Any]) -> str:
    """Return a table with millions of instructions for each token, and ours as a share of the peer's."""
    table = [["code", "type", "step", "llama.cpp", "oaiserve", "share"]]
    for row in results["rows"]:
        peer = row["llama.cpp"]
        ours = row["oaiserve"]
        cells = [row["variant"].removeprefix("aarch64-"), row["dtype"], row["step"]]
        table.append([*cells, f"{peer / 1e6:.0f}", f"{ours / 1e6:.0f}", f"{ours / peer:.2f}"])
    return "\n".join(as_markdown(table))


if __name__ == "__main__":
    main()
