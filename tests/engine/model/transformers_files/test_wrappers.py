"""The text model of a multimodal checkpoint answers as transformers' multimodal model answers texts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from oaiserve.checkpoints.soundness import refuse_unless_sound
from oaiserve.checkpoints.source import find_model
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.model_config import quantization_of
from oaiserve.engine.model.transformers_files.wrapper import text_config
from oaiserve.engine.start.described import describe_model
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from tests.engine.executors.native import small_models
from tests.engine.model.runners import greedy_answers, make_engine, states_of
from tests.engine.model.steps import BLOCK_SIZE
from tests.engine.text.tokenizers_for_tests import CHATML
from tests.models.decoders import byte_tokenizer, generate
from tests.models.described import model_of_files
from tests.models.in_blocks import OPTIONS, kept_logits
from tests.models.packed import Packing, write_checkpoint
from tests.models.wrappers import random_wrapper, save_wrapper, wrapper_config

PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12]
NUM_TOKENS = 12
NUM_BLOCKS = 16


def answers(spec: ModelSpec, executor: Executor) -> list[list[int]]:
    runner = ModelRunner(executor, spec.device, BLOCK_SIZE, states=states_of(spec))
    with make_engine(spec, runner, NUM_BLOCKS, max_running=8, max_step_tokens=9) as engine:
        return greedy_answers(engine, PROMPTS, NUM_TOKENS)


def answers_of_files(folder: Path) -> list[list[int]]:
    """Return the answers of the reference."""
    spec, decoder, *_ = describe_model(find_model(folder), replace(OPTIONS, compile=False))
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    return answers(spec, ReferenceExecutor(decoder, dtype=spec.dtype, device=spec.device, **sizes))


# One wrapper of each layout of files, each text model whose tokens have positions in three dimensions, and those whose
# last layers take their keys and values from others.
@pytest.mark.parametrize(
    "name",
    [
        *("gemma3", "mistral3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "smolvlm", "qwen3_5"),
        *("lfm2_vl", "gemma3n", "gemma4", "llama4", "paligemma"),
    ],
)
def test_answers_equal_those_of_the_multimodal_model(name: str, tmp_path: Path) -> None:
    wrapper = save_wrapper(name, tmp_path)
    expected = generate(wrapper, PROMPTS, NUM_TOKENS)
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS), "the answers must be able to differ"
    refuse_unless_sound(find_model(tmp_path))
    assert answers_of_files(tmp_path) == expected


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "mistral3", "gemma3", "lfm2_vl"])
def test_the_text_model_has_the_native_step(name: str, tmp_path: Path) -> None:
    wrapper = save_wrapper(name, tmp_path)
    found = describe_model(find_model(tmp_path), OPTIONS)
    native = small_models.native_of(found, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_threads=1)
    assert answers(found.spec, native) == generate(wrapper, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("columns_first", [False, True], ids=["as transformers saves them", "as published"])
def test_experts_of_a_wrapper_are_read_in_both_layouts(columns_first: bool, tmp_path: Path) -> None:
    wrapper = save_wrapper("qwen3_vl_moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if columns_first:
        turned = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
        assert len(turned) == 6
        save_file(tensors | turned, path, {"format": "pt"})
    expected = generate(wrapper, PROMPTS, NUM_TOKENS)
    assert answers_of_files(tmp_path) == expected
    model = model_of_files(tmp_path)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert generate(model, PROMPTS, NUM_TOKENS) == expected


def test_the_text_of_a_model_that_speaks_is_that_of_the_part_that_thinks(tmp_path: Path) -> None:
    thinker = save_wrapper("qwen2_5_omni_thinker", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(tensors | {"talker.model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}, path, {"format": "pt"})
    settings = {"model_type": "qwen2_5_omni", "thinker_config": thinker.config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert answers_of_files(tmp_path) == generate(thinker, PROMPTS, NUM_TOKENS)


def test_layers_that_take_their_keys_from_others_need_no_memory_of_their_own(tmp_path: Path) -> None:
    save_wrapper("gemma4", tmp_path)
    spec, decoder, *_ = describe_model(find_model(tmp_path), OPTIONS)
    assert len(decoder.layers) == 4
    assert [(shape.kv_heads, shape.key_dim) for shape in spec.kv_shapes.values()] == [(2, 16), (2, 32)]


def test_what_reads_images_is_not_needed(tmp_path: Path) -> None:
    random_wrapper("gemma3").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    texts = {name: tensor for name, tensor in tensors.items() if name.startswith("language_model.")}
    assert len(texts) < len(tensors)
    save_file(texts, path, {"format": "pt"})
    names = [name for name, _ in model_of_files(tmp_path).named_parameters()]
    assert len(names) == len(texts)
    assert not any("vision" in name for name in names)
    describe_model(find_model(tmp_path), OPTIONS)


def test_the_chat_template_may_be_that_of_the_processor(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    template = Tokenizer.from_pretrained(tmp_path).chat_template
    assert template.source == CHATML


def test_the_type_and_the_last_token_come_from_the_wrapper_where_the_text_has_none() -> None:
    config = wrapper_config("llava")
    config.dtype = torch.bfloat16
    config.text_config.dtype = None
    config.eos_token_id = 7
    config.text_config.eos_token_id = None
    text = text_config(config)
    assert (text.model_type, text.dtype, text.eos_token_id) == ("llama", torch.bfloat16, 7)


def test_quantized_weights_that_are_not_read_are_refused_in_a_wrapper_too() -> None:
    config = wrapper_config("mistral3")
    config.quantization_config = {"quant_method": "hqq"}
    text = text_config(config)
    with pytest.raises(
        StartupError, match=r"^'m' cannot be served: its weights are quantized by hqq, which is not read"
    ):
        quantization_of(text, "m")


def wrapped(plain: Path, folder: Path) -> Path:
    """Write the checkpoint of a text model as that of a multimodal one."""
    folder.mkdir()
    tensors = load_file(plain / "model.safetensors")
    in_wrapper = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    vision = {"vision_tower.layers.0.qweight": torch.zeros(2, 2), "multi_modal_projector.weight": torch.zeros(3)}
    save_file(in_wrapper | vision, folder / "model.safetensors", {"format": "pt"})
    config = wrapper_config("gemma3").to_dict()
    own = json.loads((plain / "config.json").read_text())
    config |= {"quantization_config": own.pop("quantization_config", None), "dtype": own["dtype"]}
    config["text_config"] = own
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.compiler
@pytest.mark.parametrize("quantize", ["before", "when it is loaded"])
def test_weights_in_integers_are_those_of_the_text_model_alone(quantize: str, tmp_path: Path) -> None:
    asked = small_models.config("gemma3_text", vocab_size=256, sliding_window=6, tie_word_embeddings=True)
    text = small_models.make_model(asked)
    options: dict[str, Any] = {}
    if quantize == "before":
        write_checkpoint(tmp_path / "plain", text, Packing("awq"))
    else:
        text.save_pretrained(tmp_path / "plain")
        options = {"quantize": "int4"}
    folders = (tmp_path / "plain", wrapped(tmp_path / "plain", tmp_path / "wrapped"))
    assert torch.equal(*(kept_logits(folder, 20, **options) for folder in folders))
    if quantize == "before":
        expanded = [model_of_files(folder) for folder in folders]
        assert all(torch.equal(*pair) for pair in zip(*(one.parameters() for one in expanded), strict=True))


def test_a_wrapper_whose_text_depends_on_it_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("mllama").save_pretrained(tmp_path)
    with pytest.raises(StartupError, match="its text model needs images or audio"):
        model_of_files(tmp_path)
