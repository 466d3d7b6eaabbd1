"""The command `oaiserve pull`."""

from __future__ import annotations

import logging

from oaiserve.checkpoints import demo, hub
from oaiserve.checkpoints.progress import Doing


def command(model: str, /) -> int:
    """Download a model without serving it. Files that are here already are not downloaded again.

    Parameters
    ----------
    model
        demo, a hub id such as Qwen/Qwen3-0.6B, or one of a repository's GGUF files: unsloth/Qwen3-0.6B-GGUF:Q4_K_M.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("oaiserve").setLevel(logging.INFO)
    with Doing(f"Fetching {model}", lambda: "", logging.getLogger("oaiserve").info):
        path = demo.fetched() if model == "demo" else hub.local_source(model).path
    print(f"{model} is on this disk: {path}")
    return 0
