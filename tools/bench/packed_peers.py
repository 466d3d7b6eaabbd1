"""Measures this server against vLLM's on the same 4-bit checkpoints, in turns: python -m tools.bench.packed_peers

They are Llamas of the shape of Llama 3.2 1B with random weights, as AWQ and GPTQ store them, in groups of 128.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoModelForCausalLM

from oaiserve.files import demo
from tests.models.decoders import REAL_SHAPES
from tests.models.packed import Layout, Packing, write_checkpoint
from tools.bench import prepare
from tools.bench.servers import vllm
from tools.bench.turns import MAX_LEN, add_turns, publish_turns

SHAPE, GROUP_SIZE = "llama-3.2-1b", 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layouts = get_args(Layout)
    parser.add_argument("--layouts", nargs="+", default=["awq", "gptq"], choices=layouts, help="default: awq gptq")
    add_turns(parser, "packed-peers")
    arguments = parser.parse_args()
    publish_turns(
        arguments,
        "packed-peers",
        lambda: {f"{SHAPE} {layout}": checkpoint(layout) for layout in arguments.layouts},
        lambda folder, most: vllm(folder, max_len=MAX_LEN, max_running=most),
    )


def checkpoint(layout: Layout) -> Path:
    """Return the folder of a checkpoint with random weights and the demo model's tokenizer."""
    folder = prepare.FOLDER / f"models/packed/{SHAPE}.{layout}"
    if not folder.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(REAL_SHAPES[SHAPE], dtype=torch.float32)
        unfinished = folder.with_suffix(".part")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(unfinished, model, Packing(layout, group_size=GROUP_SIZE, is_symmetric=layout != "awq"))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo.fetched() / name, unfinished)
        unfinished.replace(folder)
    return folder


if __name__ == "__main__":
    main()
