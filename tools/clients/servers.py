"""Starts the servers that the clients ask: the demo model, a small embedding model with random weights, and Whisper."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from oaiserve.checkpoints import demo
from tests.models.poolers import FAMILIES, random_pooler, save
from tests.real.artefacts import WHISPER_BASE, fetched
from tests.real.whisper_base import write_whisper_base
from tools.bench.servers import PEERS
from tools.engines.running import running_gateway
from tools.server_process import running_oaiserve

FAMILY = "bert"
SPOKEN = "The capital of France is Paris."  # a sentence that espeak-ng speaks


@contextmanager
def running_servers(engine: str | None = None, engine_model: Path | None = None) -> Iterator[list[str]]:
    """Run the servers with their defaults, and yield what scripts are started with: features.py names it.

    With the name of another engine, the first server is a gateway in front of it, with this model or the demo model,
    there is none that transcribes speech, and the last item is the engine's own address.
    """
    with TemporaryDirectory() as folder, ExitStack() as stack:
        embedder, listener, sound = (Path(folder) / name for name in ("embedder", "whisper", "speech.wav"))
        save(embedder, FAMILY, random_pooler(FAMILIES[FAMILY]), pooling="mean")
        embedding = stack.enter_context(running_oaiserve("--served-model-name", "embedder", model=str(embedder)))
        others = [f"{embedding.url}/v1", "embedder", str(demo.fetched())]
        if engine is not None:
            generating = stack.enter_context(PEERS[engine](engine_model).running())
            gateway = stack.enter_context(running_gateway(generating.url))
            yield [f"{gateway.url}/v1", demo.NAME, *others, "", "", f"{generating.url}/v1"]
            return
        listener.mkdir()
        write_whisper_base([fetched(part) for part in WHISPER_BASE], listener)
        subprocess.run(["espeak-ng", "-s", "140", "-w", sound, SPOKEN], check=True)
        generating = stack.enter_context(running_oaiserve())
        listening = stack.enter_context(running_oaiserve("--served-model-name", "whisper-1", model=str(listener)))
        yield [f"{generating.url}/v1", "demo", *others, f"{listening.url}/v1", str(sound)]


@contextmanager
def with_flags(servers: list[str], flags: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the same, with a demo server of these flags in place of the first one, if there are flags."""
    if not flags:
        yield servers
        return
    with running_oaiserve(*flags) as generating:
        yield [f"{generating.url}/v1", *servers[1:]]
