"""Writes a model's greedy answers as JSON, with log-probabilities: on x86-64, and in the emulator on aarch64."""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oaiserve.config import CpuFeatures
from oaiserve.engine.engine import Engine
from oaiserve.engine.executors.native import prebuilt
from oaiserve.engine.executors.native.variants import VARIANTS
from oaiserve.engine.request import SamplingParams

# The lengths are one token, a few, and more than a block of the KV cache, so steps have rows of several heights.
PROMPTS = (
    "The",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\nprint([",
    "Water boils at a lower temperature on a mountain, because the pressure of the air is lower there. So an egg takes",
)
NUM_ALTERNATIVES = 20
# `exact` refuses to start without the native step, where plain PyTorch would take its place.
OPTIONS: dict[str, Any] = {"device": "cpu", "exact": True, "drafts": "off", "cpu_threads": 1, "kv_blocks": 64}
AT_HWCAP = 16
AT_HWCAP2 = 26
# Bits of these entries of the auxiliary vector, by the names that Linux uses in /proc/cpuinfo.
HWCAP_BITS = {
    "fp": 0, "asimd": 1, "crc32": 7, "atomics": 8, "fphp": 9, "asimdhp": 10, "asimdrdm": 12, "asimddp": 20
}  # fmt: skip
HWCAP2_BITS = {"i8mm": 13, "bf16": 14}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("model", help="'demo', a folder or a GGUF file")
    add("output", type=Path)
    add("--tokens", type=int, required=True, help="tokens of each answer")
    add("--dtype", default="auto", help="as the server's")
    add("--cpu-features", default="native", help="as the server's")
    add("--variant", help="variant of native code to use, which must be one of aarch64")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        if arguments.variant:
            use_variant(arguments.variant, Path(folder))
        result = answer(arguments.model, PROMPTS, arguments.tokens, arguments.dtype, arguments.cpu_features)
    arguments.output.write_text(json.dumps(result))


def use_variant(name: str, folder: Path) -> None:
    """Make the engine use this variant of the wheel's native code, or exit if the CPU lacks its features.

    QEMU before version 8.1 shows programs the /proc/cpuinfo of the machine that it runs on.
    """
    (variant,) = (variant for variant in VARIANTS if variant.name == name)
    if missing := variant.features - emulated_features():
        sys.exit(f"This CPU lacks {', '.join(sorted(missing))}, which {name} needs.")
    prebuilt.CPUINFO = folder / "cpuinfo"
    prebuilt.CPUINFO.write_text(f"Features\t: {' '.join(sorted(variant.features))}\n")
    libraries = [prebuilt.find(kind) for kind in ("bf16", "float")]
    if not all(library is not None and f"-{name}-" in library.name for library in libraries):
        sys.exit(f"The wheel has no libraries for {name}, but {libraries}.")


def emulated_features() -> frozenset[str]:
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.restype = ctypes.c_ulong
    getauxval.argtypes = [ctypes.c_ulong]
    entries = ((HWCAP_BITS, getauxval(AT_HWCAP)), (HWCAP2_BITS, getauxval(AT_HWCAP2)))
    return frozenset(name for bits, entry in entries for name, bit in bits.items() if entry >> bit & 1)


def answer(
    model: str, prompts: Sequence[str], num_tokens: int, dtype: str, cpu_features: CpuFeatures
) -> dict[str, Any]:
    """Return the answers, each a list of [token id, [[id, log-probability], ...]]."""
    with Engine.from_pretrained(model, dtype=dtype, cpu_features=cpu_features, **OPTIONS) as engine:
        loaded_seconds = time.process_time()
        return {
            "machine": platform.machine(),
            "dtype": engine.model_info["dtype"].removeprefix("torch."),
            "answers": [positions(engine, prompt, num_tokens) for prompt in prompts],
            "load_cpu_seconds": loaded_seconds,
            "cpu_seconds": time.process_time(),
        }


def positions(engine: Engine, prompt: str, num_tokens: int) -> list[Any]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=NUM_ALTERNATIVES)
    (chunk,) = engine.generate([prompt], params)
    assert chunk.logprobs is not None
    ids, _, logprobs, ends, _ = chunk.logprobs.columns
    spans = zip((0, *ends[:-1]), ends, strict=True)
    return [[ids[start], list(zip(ids[start:end], logprobs[start:end], strict=True))] for start, end in spans]


if __name__ == "__main__":
    main()
