"""The draft model's weights, and its runner: the native step, with a KV cache whose blocks have the model's numbers."""

from __future__ import annotations

import logging
from typing import NamedTuple, Protocol

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.description import NotKnown
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import ModelSpec
from oaiserve.errors import StartupError
from oaiserve.files.start_cache import NotRemembered

log = logging.getLogger(__name__)


class MakeNative(Protocol):
    def __call__(self, *, num_blocks: int, num_threads: int) -> NativeDecoder:
        """Make the native step. Raises BuildError, NotKnown and NotRemembered."""


class DraftWeights(NamedTuple):
    """A draft model whose native step has not been made yet, because the size of its KV cache is not known."""

    name: str  # as the user gave it
    spec: ModelSpec
    make: MakeNative

    def start(self, options: EngineOptions, *, num_blocks: int, vocab_size: int) -> ModelRunner:
        """Make the runner. Raises StartupError if the native step cannot be used."""
        try:
            native = self.make(num_blocks=num_blocks, num_threads=options.cpu_threads or default_threads())
        except (BuildError, NotKnown) as error:
            raise StartupError(
                f"--draft-model {self.name} needs the native step, which cannot be used: {error}."
            ) from error
        except NotRemembered as error:
            raise StartupError(f"--draft-model {self.name}: {error}. Start once with --recheck.") from error
        torch.set_num_threads(native.torch_threads)
        size = num_blocks * options.block_size * self.spec.kv_bytes_per_token
        log.info("%s guesses tokens; its KV cache takes %.2f GiB", self.spec.name, size / 2**30)
        same = self.spec.vocab_size == vocab_size
        return ModelRunner(native if same else _OfVocabulary(native, vocab_size), self.spec.device, options.block_size)


class _OfVocabulary:
    """Computes a model whose rows for ids beyond the last token are not as many as those of another model.

    Such rows fill a table up to a round number, and mean nothing.
    """

    is_exact = True

    def __init__(self, native: NativeDecoder, vocab_size: int) -> None:
        self._native = native
        self._vocab_size = vocab_size

    def forward(self, batch: Batch) -> torch.Tensor:
        batch.input_ids.clamp_(max=self._native.vocab_size - 1)
        logits = self._native.forward(batch)[:, : self._vocab_size]
        missing = self._vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits.contiguous()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self._native.copy_blocks(copies)

    def prepare(self, adapter: Adapter) -> Adapter:
        return self._native.prepare(adapter)
