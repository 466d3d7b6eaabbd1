"""The kinds of servers that are attacked. Each runs as a process with a limit on its memory, so that an attack that
succeeds takes the server, and not the machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import torch

from tools.attack.attack import ATTACKER_KEY, CHAT, HI, NEIGHBOUR_KEY
from tools.server_process import ServerProcess, free_port, running_process

MEMORY_LIMIT_BYTES = 10 * 2**30  # address space
ALIVE_SECONDS = 10.0
START_SECONDS = 600.0  # on a busy machine
# The memory of the KV cache is the system's until its blocks are used for the first time. A small cache is all in use
# after the warm-up, so that what grows later is something else.
KV_CACHE = ("--kv-cache-memory", "400MiB")
KEYS = ("--api-key", ATTACKER_KEY, "--api-key", NEIGHBOUR_KEY)
_TEXT = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "vocab_size": 49280,
}  # fmt: skip
_VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 512, "patch_size": 16,
}  # fmt: skip
LENGTH = ("--max-model-len", "4096")
KINDS = {
    "keys": LENGTH,
    "images": LENGTH,  # a random model that reads images
    "short answers": ("--max-model-len", "128", "--request-timeout-seconds", "20"),
}


@dataclass
class Server:
    """A running server of one of KINDS."""

    kind: str
    process: ServerProcess

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def pid(self) -> int:
        return self.process.process.pid

    @property
    def exit_code(self) -> int | None:
        return self.process.process.poll()

    def state(self) -> str:
        """Return `alive`, or in which way the server is not."""
        if self.exit_code is not None:
            return f"ended ({self.exit_code})"
        headers = {"authorization": f"Bearer {NEIGHBOUR_KEY}"}
        try:
            with httpx.Client(base_url=self.url, timeout=ALIVE_SECONDS, trust_env=False, headers=headers) as http:
                health = http.get("/health").status_code
                answer = http.post(CHAT, json={"messages": HI, "max_tokens": 1}).status_code
        except httpx.HTTPError as error:
            code = self.exit_code
            return f"hangs ({type(error).__name__})" if code is None else f"ended ({code})"
        return "alive" if (health, answer) == (200, 200) else f"sick (/health {health}, chat {answer})"


@contextmanager
def oaiserve(kind: str) -> Iterator[Server]:
    """Run a server of this kind. Raises StartFailed."""
    port = free_port()
    with TemporaryDirectory() as folder:
        model = f"{folder}/model" if kind == "images" else "demo"
        if kind == "images":
            _save_model(Path(model))
        command = ["prlimit", f"--as={MEMORY_LIMIT_BYTES}"]
        command += [sys.executable, "-m", "oaiserve", "serve", model, "--port", str(port), "--log-format", "json"]
        command += [*KV_CACHE, *KEYS, *KINDS[kind]]
        with running_process(
            command,
            port,
            log_file=Path(folder) / "log",
            start_limit_seconds=START_SECONDS,
            stop_limit_seconds=5.0,
        ) as process:
            yield Server(kind, process)


def _save_model(folder: Path) -> None:
    """Save a model at the shape of SmolVLM-256M with random weights, in bfloat16."""
    from tests.plugins.media.seeing import KINDS, save_whole  # The plug-in may be missing.

    pixels = {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 512}}
    kind = KINDS["smolvlm"]._replace(
        of_images=pixels, settings={"image_seq_len": 64}, config={"scale_factor": 4}, vision=_VISION, text=_TEXT
    )
    save_whole("smolvlm", kind, folder, torch.bfloat16, 0.02)
