"""Finds the task of a model from its files: to generate text, to embed it, to score pairs, or to transcribe speech.

Stdlib only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import TaskOption
from oaiserve.engine.types.pooling import Task, gguf_task


def find_task(source: ModelSource, option: TaskOption) -> Task:
    """Return the task of the model: the user's, or else that of its files. Raises BadFile and OSError."""
    if option != "auto":
        return option
    if source.gguf_file is not None:
        return gguf_task(source.checkpoint.head)
    return _of_config(source.checkpoint.config, has_modules=(source.folder / "modules.json").is_file())


def _of_config(config: Mapping[str, Any], *, has_modules: bool) -> Task:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        architecture = str(architectures[0])
    else:
        architecture = ""
    if architecture.endswith("ForSequenceClassification"):
        return "score"
    if architecture == "WhisperForConditionalGeneration":
        return "transcribe"
    if has_modules:  # sentence-transformers writes a modules.json.
        return "embed"
    # A folder of bare layers, or of an encoder with its training head.
    is_bare = architecture.endswith(("Model", "ForMaskedLM", "ForPreTraining")) and not architecture.endswith(
        "LMHeadModel"
    )
    has_more = config.get("is_encoder_decoder") or any(config.get(f"{kind}_config") for kind in ("vision", "audio"))
    if is_bare and not has_more:
        return "embed"
    return "generate"
