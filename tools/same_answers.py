"""Counts the answers that change with the company they keep: python -m tools.same_answers

Each prompt is asked alone, and then all prompts at once, on a new engine each time. It prints how many answers differ.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from typing import get_args

from oaiserve import Engine, SamplingParams
from oaiserve.config import Dtype, KVCacheDtype, Quantize
from oaiserve.files import demo

LEAST_ID = 100  # lower ids are special tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtype", default="bfloat16", choices=get_args(Dtype), help="as the server's")
    add("--quantize", default="none", choices=get_args(Quantize), help="as the server's")
    add("--kv-cache-dtype", default="auto", choices=get_args(KVCacheDtype), help="as the server's")
    add("--eager", action="store_true", help="transformers' code, as with --no-compile")
    add("--prompts", type=int, default=18, help="default: 18")
    add("--prompt-tokens", type=int, default=32, help="default: 32")
    add("--answer-tokens", type=int, default=128, help="default: 128")
    arguments = parser.parse_args()
    rng = random.Random(0)
    with Engine.from_pretrained(
        demo.resolve(),
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        kv_cache_dtype=arguments.kv_cache_dtype,
        compile=not arguments.eager,
        prefix_cache=False,
        max_running=arguments.prompts,
        max_model_len=2048,
    ) as engine:
        prompts = [
            [rng.randrange(LEAST_ID, engine.vocab_size) for _ in range(arguments.prompt_tokens)]
            for _ in range(arguments.prompts)
        ]
        greedy = SamplingParams(max_tokens=arguments.answer_tokens, temperature=0.0, ignore_eos=True)
        for name, params in (("greedy", greedy), ("seeded", replace(greedy, temperature=1.0, seed=1))):
            alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
            together = [completion.token_ids for completion in engine.generate(prompts, params)]
            differing = sum(one != other for one, other in zip(alone, together, strict=True))
            print(f"{name}: {differing} of {len(prompts)} answers differ from those alone")


if __name__ == "__main__":
    main()
