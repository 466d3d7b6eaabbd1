"""Starts the servers that the clients ask: the demo model, and a small embedding model with random weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from oaiserve import demo
from tools.random_poolers import FAMILIES, random_pooler, save
from tools.server_process import running_oaiserve

FAMILY = "bert"


@contextmanager
def running_servers() -> Iterator[list[str]]:
    """Run both servers with their defaults, and yield what scripts are started with: features.py names it."""
    with TemporaryDirectory() as folder:
        save(Path(folder), FAMILY, random_pooler(copy.deepcopy(FAMILIES[FAMILY])), pooling="mean")
        with (
            # lm-eval can take the tokenizer from the server, which shows it only if it is told to.
            running_oaiserve("--tokenizer-info") as generating,
            running_oaiserve("--served-model-name", "embedder", model=folder) as embedding,
        ):
            yield [f"{generating.url}/v1", "demo", f"{embedding.url}/v1", "embedder", str(demo.resolve())]
