"""The defaults of requests in a model's files: generation_config.json, and the metadata of a GGUF file."""

import json
from pathlib import Path
from typing import Any

import pytest

from oaiserve.checkpoints.model_defaults import stated_defaults
from oaiserve.checkpoints.source import ModelSource, find_model
from tests.engine.text.gguf import files

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def folder(path: Path, **configs: dict[str, Any]) -> ModelSource:
    (path / "config.json").write_text("{}")
    for name, config in configs.items():
        (path / f"{name}.json").write_text(json.dumps(config))
    return find_model(path)


def gguf_file(
    path: Path,
    sampling: dict[str, Any],
    more: dict[str, Any] | None = None,
    name: str = "model.gguf",
    **configs: dict[str, Any],
) -> ModelSource:
    """Return a file with these metadata, those of `sampling` by their last words."""
    folder(path, **configs)
    values = {f"general.sampling.{name}": value for name, value in sampling.items()} | (more or {})
    return find_model(files.write(path / name, {"general.architecture": "llama"} | values))


@pytest.mark.parametrize(
    ("configs", "stated"),
    [
        (
            {"generation_config": {"temperature": 1.0, "top_k": 64, "do_sample": True}},
            {"temperature": 1.0, "top_k": 64},
        ),
        ({"generation_config": {"do_sample": False, "eos_token_id": 2, "top_p": None}}, {}),
        ({"generation_config": {"max_new_tokens": 40, "max_length": 2048}}, {"max_new_tokens": 40, "max_length": 2048}),
        ({"generation_config": {"max_length": 0, "max_new_tokens": "9", "top_k": 5}}, {"top_k": 5}),
        ({"generation_config": {}, "config": {"temperature": 0.5}}, {}),
        ({"config": {"temperature": 0.5}}, {"temperature": 0.5}),  # as old checkpoints have it
        ({}, {}),
    ],
)
def test_folder_states_the_defaults_of_its_generation_config(
    tmp_path: Path, configs: dict[str, Any], stated: dict[str, Any]
) -> None:
    assert stated_defaults(folder(tmp_path, **configs), NAMES) == stated


@pytest.mark.parametrize(
    ("metadata", "configs", "stated"),
    [
        (
            {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "penalty_repeat": 1.05},
            {},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.05},
        ),
        ({"temp": 0.7, "top_p": 0.8}, {"generation_config": {"temperature": 0.3}}, {"temperature": 0.3, "top_p": 0.8}),
        ({"penalty_repeat": 1.1, "penalty_last_n": 0}, {}, {}),
        ({"penalty_repeat": 1.1, "penalty_last_n": 64, "mirostat": 0}, {}, {"repetition_penalty": 1.1}),
        ({}, {"config": {"temperature": 0.5}}, {}),  # the file is not of that model
    ],
)
def test_gguf_file_states_the_defaults_of_its_metadata(
    tmp_path: Path, metadata: dict[str, Any], configs: dict[str, Any], stated: dict[str, Any]
) -> None:
    assert stated_defaults(gguf_file(tmp_path, metadata, **configs), NAMES) == stated


@pytest.mark.parametrize("content", ["{", "\ud800"])
def test_unreadable_generation_config_is_reported_and_not_used(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = gguf_file(tmp_path, {"temp": 0.7})
    (tmp_path / "generation_config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    assert stated_defaults(source, NAMES) == {"temperature": 0.7}
    assert "generation_config.json are not used, because it cannot be read" in caplog.text
