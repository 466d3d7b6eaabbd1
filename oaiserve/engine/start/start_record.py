"""The record of a start, which lets `oaiserve list` find the model, and a later start the blocks that --quantize
made."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.gguf import shard_paths
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.quantized_file import FileIdentity, QuantizedFile, find
from oaiserve.runtime import Runtime
from oaiserve.storage.private import NotPrivate
from oaiserve.storage.start_cache import AFTER_SECONDS, NotRemembered, Subject, of_record, recall, remember, subject

log = logging.getLogger(__name__)

_FILES = (".json", ".safetensors")


def subject_of(checkpoint: Checkpoint, options: EngineOptions) -> Subject | None:
    """Return the subject of a model, a folder or a GGUF file; None for a file whose parts are in several folders."""
    model = checkpoint.path
    parts = shard_paths(model) if model.is_file() else []
    if len({part.resolve().parent for part in parts}) > 1:
        return None
    return subject(
        "model",
        model,
        _FILES,
        options={"quantize": options.quantize},
        packages=("oaiserve",),
        digest=checkpoint.head_digest if parts else None,
        parts=parts,
    )


def recall_start(subject: Subject) -> Path | None:
    """Return the file with the blocks that an earlier start made, or None if it made none. Raises NotRemembered."""
    record = recall(subject)
    with of_record(record.path):
        quantized = record.data["quantized"]
        if quantized is None:
            return None
        path = find(FileIdentity(**quantized))
        if path is None:
            raise NotRemembered("the weights that were quantized are not in the cache any more")
        return path


def remember_start(subject: Subject, quantized: QuantizedFile | None, runtime: Runtime) -> None:
    """Record a model that has started, once the start is over, so that no request waits for this."""

    def data() -> dict[str, Any]:
        return {"quantized": None if quantized is None else asdict(quantized.finish(subject.record.name))}

    def write() -> None:
        try:
            if remember(subject, data, b"") is None:
                log.debug("The start is not recorded, because the model's files have changed meanwhile")
        except (NotPrivate, OSError) as error:
            log.debug("The start is not recorded: %s", error)

    runtime.later("remember", AFTER_SECONDS, write)
