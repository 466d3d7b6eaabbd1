"""What sentence-transformers' files say of a model's vectors."""

import json
from pathlib import Path
from typing import Any

import pytest

from oaiserve.checkpoints.source import ModelSource
from oaiserve.errors import StartupError
from oaiserve.plugins.pooling.model.files import PoolingFiles, read_files, read_score_files

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}


def source(folder: Path, **files: Any) -> ModelSource:
    """Write files, given by their names with _ for / and without .json."""
    for name, value in files.items():
        path = folder / f"{name.replace('1_Pooling_', '1_Pooling/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
    return ModelSource(str(folder), None, is_local=True)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, "lasttoken"),
        ({"pooling_mode": "cls", "embedding_dimension": 8}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_the_mode_of_pooling_is_read_in_both_forms(config: dict[str, Any], mode: str, tmp_path: Path) -> None:
    where = source(tmp_path, **{"modules": [TRANSFORMER, POOLING], "1_Pooling_config": config})
    assert read_files(where).mode == mode


def test_prompts_and_lengths_are_read(tmp_path: Path) -> None:
    where = source(
        tmp_path,
        modules=[TRANSFORMER, POOLING],
        **{"1_Pooling_config": {"pooling_mode": "cls"}},
        sentence_bert_config={"max_seq_length": 256, "do_lower_case": False},
        config_sentence_transformers={"prompts": {"query": "Q: ", "none": ""}, "default_prompt_name": "query"},
    )
    assert read_files(where) == PoolingFiles("cls", (), 256, {"query": "Q: ", "none": ""}, "Q: ")


@pytest.mark.parametrize("stated", [{}, {"max_seq_length": None}])
def test_without_a_length_of_its_own_a_model_has_that_of_its_tokenizer(stated: dict[str, Any], tmp_path: Path) -> None:
    where = source(
        tmp_path,
        modules=[TRANSFORMER],
        sentence_bert_config={"transformer_task": "feature-extraction"} | stated,
        tokenizer_config={"model_max_length": 128},
    )
    assert read_files(where).max_tokens == 128


def test_a_cross_encoder_has_a_default_prompt(tmp_path: Path) -> None:
    settings = {"prompts": {"web": "Find: "}, "default_prompt_name": "web", "activation_fn": "torch.nn.Identity"}
    files = read_score_files(source(tmp_path, config_sentence_transformers=settings))
    assert (files.default_prompt, files.activation) == ("Find: ", "torch.nn.Identity")


def test_a_model_without_these_files_says_nothing(tmp_path: Path) -> None:
    assert read_files(source(tmp_path)) == PoolingFiles()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"modules": [TRANSFORMER | {"path": "0_Transformer"}, POOLING]}, "folder '0_Transformer'"),
        ({"modules": [TRANSFORMER, {"path": "1_Dense", "type": "pylate.models.Dense.Dense"}]}, "several vectors"),
        ({"modules": [TRANSFORMER, {"path": "1_L", "type": "sentence_transformers.x.LogitScore"}]}, "--task generate"),
        ({"modules": [TRANSFORMER, {"path": "1_CNN", "type": "sentence_transformers.models.CNN"}]}, "module 'CNN'"),
        (
            {
                "modules": [
                    *(TRANSFORMER, POOLING, {"path": "2", "type": "sentence_transformers.models.Normalize"}),
                    {"path": "3", "type": "sentence_transformers.models.Dense"},
                ]
            },
            "Dense after Normalize",
        ),
        ({"config_sentence_transformers": {"model_type": "MultiVectorEncoder"}}, "several vectors"),
        ({"config_sentence_transformers": {"model_type": "SparseEncoder"}}, "sparse ones"),
        ({"1_Pooling_config": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}}, "mean, cls"),
        ({"1_Pooling_config": {"pooling_mode": "median"}}, "median"),
        ({"1_Pooling_config": {}}, "none"),
        ({"1_Pooling_config": {"pooling_mode": "cls", "include_prompt": False}}, "include_prompt"),
        ({"sentence_bert_config": {"do_lower_case": True}}, "do_lower_case"),
        ({"config_sentence_transformers": {"default_prompt_name": "query"}}, "default prompt is 'query'"),
    ],
)
def test_what_is_not_known_is_refused(files: dict[str, Any], says: str, tmp_path: Path) -> None:
    default = {"modules": [TRANSFORMER, POOLING], "1_Pooling_config": {"pooling_mode": "cls"}}
    with pytest.raises(StartupError, match=says):
        read_files(source(tmp_path, **(default | files)))


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(StartupError, match=r"modules\.json of '.*' cannot be read"):
        read_files(source(tmp_path))
