"""The sampling that publishers recommend: its values are allowed, and each row has models that it is for."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from oaiserve.checkpoints.model_defaults import model_defaults
from oaiserve.checkpoints.recommended_sampling import ROWS, recommended
from oaiserve.routes.intake.sampling_defaults import given_defaults
from tests.checkpoints.test_model_defaults import NAMES, folder, gguf_file

QWEN_SMALL = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
# A name for each row, in their order.
EXAMPLES = (
    "Qwen2.5 Coder 0.5B Instruct AWQ",
    "Qwen2.5-Coder-32B-Instruct",
    "qwen2.5-1.5b-instruct-q8_0",
    "Qwen2-7B-Instruct",
    "Qwen3-Coder-30B-A3B-Instruct",
    "Qwen3-4B-Instruct-2507",
    "Qwen3-30B-A3B",
    "Qwen3.5-27B",
    "Qwen3.8 27B",
    "QwQ-32B",
    "Meta Llama 3.1 8B Instruct",
    "Gemma 3 270m",
    "gemma-4-E2B-it",
    "DeepSeek R1 Distill Qwen 1.5B",
    "DeepSeek-V4-Flash",
    "gpt-oss-20b",
    "GLM-Z1-9B-0414",
    "GLM-4.6",
    "Mistral Small 3.1 24B Instruct 2503",
    "LFM2-1.2B",
    "SmolLM3-3B",
    "MiniMax-M3",
)


@pytest.mark.parametrize(("row", "name"), list(zip(ROWS, EXAMPLES, strict=True)), ids=EXAMPLES)
def test_row_is_for_a_model_and_has_a_source_and_values_that_requests_may_have(row: Any, name: str) -> None:
    assert recommended([name]) is row
    assert row.publisher
    assert urlsplit(row.source).scheme == "https"
    text = ",".join(f"{parameter}={value}" for parameter, value in row.values.items())
    assert given_defaults(text) == row.values


@pytest.mark.parametrize(
    "name",
    [
        *(
            "Qwen2.5-Coder-0.5B",
            "Qwen2.5-14B-Instruct",
            "Qwen3-8B-Base",
            "Qwen3-30B-A3B-Base",
            "Qwen3-Embedding-0.6B",
            "Qwen3-VL-8B-Instruct",
        ),
        *(
            "Llama-3.1-8B",
            "Llama-3.2-1B-Instruct",
            "Tiny-Qwen2.5-0.5B-Instruct",
            "LFM2-VL-1.6B",
            "LFM2.5-1.2B",
            "LFM2-1.2B-RAG",
        ),
        *("SmolLM3-3B-Base", "SmolLM2-135M-Instruct", "QwQ-32B-Preview", "Mistral-Small-24B-Base-2501", ""),
    ],
)
def test_bases_other_sizes_and_others_models_have_no_recommendation(name: str) -> None:
    assert recommended([name]) is None


def test_surest_name_comes_first() -> None:
    names = ["my own model", "Qwen2.5-Coder-32B-Instruct", "Qwen2.5-Coder-0.5B-Instruct"]
    assert recommended(names) == ROWS[1]


@pytest.mark.parametrize(
    "metadata",
    [
        {"general.name": "Qwen2.5 Coder 0.5B Instruct AWQ"},
        {"general.basename": "Qwen2.5-Coder", "general.size_label": "0.5B", "general.finetune": "Instruct"},
    ],
)
def test_gguf_file_that_names_no_sampling_gets_its_publishers(tmp_path: Path, metadata: dict[str, str]) -> None:
    source = gguf_file(tmp_path, {}, more=metadata)
    assert model_defaults(source, NAMES, {}) == (QWEN_SMALL, ROWS[0])


def test_file_name_and_repository_are_names_too(tmp_path: Path) -> None:
    repository = tmp_path / "models--Qwen--Qwen2.5-Coder-0.5B-Instruct" / "snapshots" / "0123"
    repository.mkdir(parents=True)
    assert model_defaults(folder(repository), NAMES, {}).recommendation == ROWS[0]
    path = gguf_file(tmp_path, {}).path.rename(tmp_path / "qwen2.5-0.5b-instruct-q4_k_m.gguf")
    source = gguf_file(tmp_path, {}, name=path.name)
    assert model_defaults(source, NAMES, {}).recommendation == ROWS[2]


@pytest.mark.parametrize(
    ("metadata", "configs", "values"),
    [
        ({"temp": 0.5}, {}, {"temperature": 0.5}),
        ({}, {"generation_config": {"repetition_penalty": 1.2}}, {"repetition_penalty": 1.2}),
    ],
)
def test_sampling_in_the_files_leaves_no_place_for_a_recommendation(
    tmp_path: Path, metadata: dict[str, Any], configs: dict[str, Any], values: dict[str, Any]
) -> None:
    source = gguf_file(tmp_path, metadata, more={"general.name": "Qwen2.5 Coder 0.5B Instruct"}, **configs)
    assert model_defaults(source, NAMES, {}) == (values, None)


def test_limits_in_the_files_join_a_recommendation(tmp_path: Path) -> None:
    config = {"generation_config": {"max_new_tokens": 40}}
    source = gguf_file(tmp_path, {}, more={"general.name": "Qwen2.5 Coder 0.5B Instruct"}, **config)
    assert model_defaults(source, NAMES, {}) == (QWEN_SMALL | {"max_new_tokens": 40}, ROWS[0])


def test_measured_defaults_come_before_a_recommendation(tmp_path: Path) -> None:
    source = gguf_file(tmp_path, {}, more={"general.name": "Qwen2.5 Coder 0.5B Instruct"})
    assert model_defaults(source, NAMES, {"temperature": 0}) == ({"temperature": 0}, None)
