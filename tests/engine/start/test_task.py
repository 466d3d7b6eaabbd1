"""The task of a model follows from its files, unless the user names one."""

import json
from pathlib import Path

import pytest
from transformers import BertConfig, LlamaConfig, PreTrainedConfig, T5Config, WhisperConfig

from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import EngineOptions, OptionError
from oaiserve.engine.start.task import find_task
from tests.models.encoder_files import write_encoder


@pytest.mark.parametrize(
    ("config", "has_modules", "task"),
    [
        (LlamaConfig(architectures=["LlamaForCausalLM"]), False, "generate"),
        (LlamaConfig(architectures=["LlamaForCausalLM"]), True, "embed"),
        (LlamaConfig(architectures=["LlamaModel"]), False, "embed"),
        (LlamaConfig(architectures=["LlamaForSequenceClassification"]), False, "score"),
        (LlamaConfig(), False, "generate"),
        (BertConfig(architectures=["BertModel"]), False, "embed"),
        (BertConfig(architectures=["BertForMaskedLM"]), False, "embed"),
        (BertConfig(architectures=["BertForPreTraining"]), False, "embed"),
        (BertConfig(architectures=["BertLMHeadModel"]), False, "generate"),
        (BertConfig(architectures=["BertForSequenceClassification"]), True, "score"),
        (T5Config(architectures=["T5Model"]), False, "generate"),
        (WhisperConfig(architectures=["WhisperForConditionalGeneration"]), False, "transcribe"),
    ],
)
def test_the_task_of_a_folder(config: PreTrainedConfig, has_modules: bool, task: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    if has_modules:
        (tmp_path / "modules.json").write_text("[]")
    source = ModelSource(str(tmp_path), None, is_local=True)
    assert find_task(source, "auto") == task
    assert find_task(source, "generate") == "generate"
    assert find_task(source, "score") == "score"


@pytest.mark.parametrize("architectures", [7, [], [None], {"0": "LlamaModel"}])
def test_a_folder_with_odd_architectures_generates(architectures: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    assert find_task(ModelSource(str(tmp_path), None, is_local=True), "auto") == "generate"


@pytest.mark.parametrize(
    ("name", "pooling", "task"),
    [("bert-cls", None, "embed"), ("bert-rank", None, "score"), ("qwen3", None, "embed"), ("qwen3", 0, "generate")],
)
def test_the_task_of_a_gguf_file(name: str, pooling: int | None, task: str, tmp_path: Path) -> None:
    path = write_encoder(tmp_path, name) if pooling is None else write_encoder(tmp_path, name, pooling=pooling)
    source = ModelSource(str(tmp_path), path.name, is_local=True)
    assert find_task(source, "auto") == task
    assert find_task(source, "generate") == "generate"


@pytest.mark.parametrize(("name", "task"), [("bert-rank", "score"), ("bert-cls", "embed"), ("qwen3", "generate")])
def test_the_task_of_a_gguf_file_that_names_no_pooling(name: str, task: str, tmp_path: Path) -> None:
    path = write_encoder(tmp_path, name, names_pooling=False)
    assert find_task(ModelSource(str(tmp_path), path.name, is_local=True), "auto") == task


def test_only_known_tasks_are_options() -> None:
    with pytest.raises(OptionError, match="--task is 'chat', but must be one of auto, generate, embed, score"):
        EngineOptions(task="chat")
