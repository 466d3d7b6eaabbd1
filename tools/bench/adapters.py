"""Measures what LoRA adapters cost: python -m tools.bench.adapters

So many streams are answered in turns: with the model alone, and spread over several adapters. Adapters are random, and
for all linear layers. The table has the median tokens per second, and the ratio of the pairs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from tests.models.adapters import write_adapter
from tools.bench import machine
from tools.engine_load import complete, random_prompts
from tools.markdown import as_markdown, publish
from tools.paired import interval, measure_pairs

PROMPT_TOKENS = 32
HEADER = ["streams", "adapters", "rank", "tokens/s without", "tokens/s with", "ratio (95 % interval)"]


def rate(engine: Engine, numbers: Sequence[int], num_streams: int, num_tokens: int, seed: int) -> float:
    """Return the tokens per second of streams that have these adapters in turns."""
    prompts = random_prompts(num_streams, PROMPT_TOKENS, engine.vocab_size, seed)
    run = complete(engine, prompts, num_tokens, adapters=numbers)
    return num_streams * num_tokens / run.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--markdown", type=Path, help="the page whose table is replaced")
    arguments = parser.parse_args()
    table: list[list[str]] = []
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        options = EngineOptions(
            device="cpu", dtype=arguments.dtype, quantize=arguments.quantize, drafts="off", lora_dir=Path(folder)
        )
        engine = Engine.from_pretrained(arguments.model, options)
        shapes = engine.adapters.adaptable
        with engine:
            complete(engine, random_prompts(4, PROMPT_TOKENS, engine.vocab_size, 1), 16)
            for rank in arguments.ranks:
                names = [f"{rank}-{index}" for index in range(arguments.adapters)]
                paths = [
                    write_adapter(Path(folder) / name, shapes, rank=rank, seed=seed, size=0.1)
                    for seed, name in enumerate(names)
                ]
                numbers = [engine.load_adapter(name, path).number for name, path in zip(names, paths, strict=True)]
                for num_streams in arguments.streams:

                    def run(seed: int, used: Sequence[int], num_streams: int = num_streams) -> float:
                        return rate(engine, used, num_streams, arguments.tokens, seed)

                    used = numbers[:num_streams]
                    pairs = measure_pairs(
                        lambda seed, used=used: run(seed, used), lambda seed: run(seed, [0]), arguments.pairs
                    )
                    table.append(
                        [
                            str(num_streams),
                            str(len(used)),
                            str(rank),
                            f"{statistics.median(without for _, without in pairs):.0f}",
                            f"{statistics.median(with_adapters for with_adapters, _ in pairs):.0f}",
                            interval([with_adapters / without for with_adapters, without in pairs]),
                        ]
                    )
                    figures.append({"streams": num_streams, "adapters": len(used), "rank": rank, "pairs": pairs})
                    print(*table[-1], sep=" | ", file=sys.stderr, flush=True)
                for name in names:
                    engine.unload_adapter(name)
    text = "\n".join([machine.sentence(), "", *as_markdown([HEADER, *table])])
    publish(arguments, "adapters", {"machine": machine.sentence(), "figures": figures}, text)


if __name__ == "__main__":
    main()
