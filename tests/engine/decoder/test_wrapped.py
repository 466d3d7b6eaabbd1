"""The text models of multimodal models are described as the plain models of their families."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.decoder.keys import refuse_ignored
from oaiserve.engine.decoder.settings import settings_of, table
from oaiserve.engine.decoder.sources.wrapped_names import own_name
from tests.models.described import decoder_in, settings_in
from tests.models.fingerprints import text_of
from tests.models.pinned import PINNED, fill, pinned_text
from tests.models.wrappers import random_wrapper

TABLE = table()
# The pinned models that have the text models of wrappers, by the type of these.
_PLAIN = {
    **{name: name for name in ("cohere2", "exaone4", "gemma", "gemma3_text", "gemma4_text", "gemma4_unified_text")},
    **{name: name for name in ("lfm2", "llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", "qwen3_5_moe_text")},
    **dict.fromkeys(("glm4v_text", "glm_ocr_text"), "glm4"),
    "glm4v_moe_text": "glm4_moe",
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), "qwen2"),
    "qwen3_vl_text": "qwen3",
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_omni_moe_text"), "qwen3_moe"),
}
WRAPPERS = [name for name, row in TABLE["wrappers"].items() if row["text"] in _PLAIN]
# By which of a token's positions, in time, height and width, each pair is rotated.
_AXES = {
    "glm4v_text": [0, 1, 2, 2],
    "glm4v_moe_text": [0, 1, 2, 2],
    "glm_ocr_text": [0, 1, 2, 2],
    "qwen2_vl_text": [0, 0, 1, 1, 1, 2, 2, 2],
    "qwen2_5_vl_text": [0, 0, 1, 1, 1, 2, 2, 2],
    "qwen2_5_omni_text": [0, 0, 1, 1, 1, 2, 2, 2],
    "qwen3_5_text": [0, 1],
    "qwen3_5_moe_text": [0, 1],
    "qwen3_omni_moe_text": [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0],
    "qwen3_vl_text": [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0],
    "qwen3_vl_moe_text": [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0],
}
_LEFT_OUT = r", axes=\S+ #\w+|num_deep 1\n"  # compared by themselves
# What text models don't have, unlike the pinned models of their families, and hashes of hashes.
_MISSING = {
    "glm_ocr_text": r"|, bias=\S+ #\w+|(?<=like 0) #\w+",
    "glm4v_moe_text": r"|\n +(query|key)_norm .*|(?<=like 1) #\w+|(?<=like layers\.0\.attention) #\w+",
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_model_of_a_wrapper_is_described_as_the_plain_one(name: str, tmp_path: Path) -> None:
    text_type = TABLE["wrappers"][name]["text"]
    plain = _PLAIN[text_type]
    config = settings_of(json.loads(PINNED[plain].config.to_json_string()))
    types = TABLE["types"]
    of_plain = {"attention_bias", "use_qk_norm"} - types[text_type]["keys"].keys()
    keys = {*types[plain]["keys"], "global_head_dim", "head_dim"} - of_plain
    of_text = {key: config[key] for key in keys & config.keys()}
    if "num_experts" in of_text:
        of_text["num_experts"] = config.get("num_local_experts", of_text["num_experts"])  # as newer files call it
    if text_type == "gemma4_unified_text":
        of_text["hidden_size_per_layer_input"] = 0
    if text_type in _AXES:
        del of_text["rope_parameters"]  # They say the same, and by which axes pairs are rotated.
    model = random_wrapper(name, {"tie_word_embeddings": config["tie_word_embeddings"]}, of_text)
    fill(model, own_name)
    model.save_pretrained(tmp_path)
    decoder = described(tmp_path)
    assert axes_of(decoder) == _AXES.get(text_type)
    assert decoder.num_deep == name.startswith(("qwen3_vl", "qwen3_omni"))
    left_out = _LEFT_OUT + _MISSING.get(text_type, "")
    actual, expected = (re.sub(left_out, "", text) for text in (text_of(decoder), pinned_text(plain)))
    assert expected.endswith(f"\n{actual}")


def test_matrices_of_all_experts_may_have_their_columns_first(tmp_path: Path) -> None:
    random_wrapper("qwen3_vl_moe").save_pretrained(tmp_path)
    expected = text_of(described(tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = {
        name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file)
    assert text_of(described(tmp_path)) == expected


@pytest.mark.parametrize(("padding_id", "expected"), [(5, 5), (0, 0), (97, 0), (-1, 0), (None, 0)])
def test_tokens_of_media_have_the_inputs_of_a_padding_token_in_the_vocabulary(
    padding_id: int | None, expected: int, tmp_path: Path
) -> None:
    random_wrapper("llava").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["pad_token_id"] = padding_id
    file.write_text(json.dumps(config))
    assert described(tmp_path).padding_id == expected


def test_vectors_in_the_places_of_tokens_have_the_factor_of_embeddings(tmp_path: Path) -> None:
    random_wrapper("llava", {}, {"model_type": "granite", "embedding_multiplier": 3.0}).save_pretrained(tmp_path)
    decoder = described(tmp_path)
    assert (decoder.embedding_scale, decoder.vector_scale) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("vision", "number"), [({}, 3), ({"deepstack_visual_indexes": [5]}, 1), ({"deepstack_visual_indexes": []}, 0)]
)
def test_images_reach_as_many_layers_as_the_vision_config_says(vision: dict[str, Any], number: int) -> None:
    assert settings_of({"model_type": "qwen3_vl", "vision_config": vision})["num_deep_layers"] == number


def described(folder: Path) -> Decoder:
    settings = settings_in(folder)
    decoder = decoder_in(folder, settings, length=128)
    refuse_ignored(settings)
    return decoder


def axes_of(decoder: Decoder) -> Any:
    tables = [layer.attention.rotary for layer in decoder.layers if layer.attention is not None]
    axes = [None if table is None or table.axes is None else table.axes.tolist() for table in tables]
    return axes[-1]
