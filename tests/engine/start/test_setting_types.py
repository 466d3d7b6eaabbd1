"""A start that fails because of a setting's type says which file, setting and value it is, and what is allowed."""

import json
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig

from oaiserve.checkpoints.load_errors import reported
from oaiserve.checkpoints.setting_types import settings_named
from oaiserve.checkpoints.soundness import refuse_unless_sound
from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.load import config_of, load_weights, read_checkpoint
from oaiserve.engine.start.plan import start_model
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from tests.engine.doubles import new_world
from tests.engine.start.setting_kinds import MORE_KEYS, with_other_kinds
from tests.models.decoders import byte_tokenizer, random_model

TOKENS = "tokenizer_config.json"
MAP = "special_tokens_map.json"
BARE = re.compile(r"\b\w+(Error|Exception)\b")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    random_model(config).save_pretrained(folder)
    byte_tokenizer(256).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


def change(path: Path, settings: dict[str, Any]) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | settings))


def start(folder: Path) -> None:
    source = find_model(folder)
    with reported("No model could be loaded"):
        refuse_unless_sound(source)
        config_of(source)
    Tokenizer.from_pretrained(folder, recheck=True)


@pytest.mark.parametrize(
    ("file", "settings", "says"),
    [
        (TOKENS, {"tokenizer_class": 77}, "its tokenizer_class is 77, but must be a text or null"),
        (
            TOKENS,
            {"added_tokens_decoder": None},
            "its added_tokens_decoder is null, but must be an object with tokens ",
        ),
        (
            TOKENS,
            {"added_tokens_decoder": {"x": {}}},
            'its added_tokens_decoder is {"x": {}}, but must be an object wi',
        ),
        (TOKENS, {"added_tokens_decoder": {"3": {"content": 5}}}, "its added_tokens_decoder.3.content is 5, but must "),
        (TOKENS, {"added_tokens_decoder": {"3": {"lstrip": None}}}, "its added_tokens_decoder.3.lstrip is null, but m"),
        (
            TOKENS,
            {"extra_special_tokens": ["<a>", None]},
            "its extra_special_tokens[1] is null, but must be a text or ",
        ),
        (TOKENS, {"additional_special_tokens": "<a>"}, 'its additional_special_tokens is "<a>", but must be a list of'),
        (TOKENS, {"auto_map": ["x"]}, 'its auto_map is ["x"], but must be an object with the names of two classes'),
        (TOKENS, {"auto_map": {"AutoTokenizer": 5}}, "its auto_map.AutoTokenizer is 5, but must be the names of two "),
        (TOKENS, {"eos_token": {"content": "</s>"}}, 'its eos_token is {"content": "</s>"}, but must be a text or an '),
        (TOKENS, {"chat_template": [{"name": "x"}]}, 'its chat_template[0] is {"name": "x"}, but must be an object th'),
        (TOKENS, {"chat_template": {"default": None}}, "its chat_template.default is null, but must be a text"),
        (TOKENS, {"split_special_tokens": None}, "its split_special_tokens is null, but must be true or false"),
        (TOKENS, {"padding_side": "x"}, 'its padding_side is "x", but must be "left" or "right"'),
        (TOKENS, {"model_input_names": None}, "its model_input_names is null, but must be a list"),
        (TOKENS, {"chat_control_tokens": 1}, "its chat_control_tokens is 1, but must be a list of texts, or null"),
        (
            MAP,
            {"bos_token": 1},
            'its bos_token is 1, but must be a text, an object such as {"content": "<s>"}, or null',
        ),
        (MAP, {"bos_token": {"content": "a", "special": True, "rstrip": 1}}, "its bos_token.rstrip is 1, but must be "),
        (MAP, {"x": {"content": 5}}, "its x.content is 5, but must be a text or null"),
        ("added_tokens.json", {"<a>": []}, "its <a> is [], but must be the id of a token"),
        ("chat_template.json", {"chat_template": 5}, "its chat_template is 5, but must be a template, a list of objec"),
        ("config.json", {"auto_map": None}, "its auto_map is null, but must be an object"),
        ("config.json", {"dtype": "load"}, 'its dtype is "load", but must be one of torch\'s, such as bfloat16'),
        (
            "config.json",
            {"id2label": {"x": "x"}},
            'its id2label is {"x": "x"}, but must be an object such as {"0": "no',
        ),
        ("config.json", {"num_labels": 0.5}, "its num_labels is 0.5, but must be an integer"),
        ("config.json", {"layer_types": [[]]}, "its layer_types[0] is [], but must be a text"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named(folder: Path, file: str, settings: dict[str, Any], says: str) -> None:
    change(folder / file, settings)
    with pytest.raises(StartupError) as refusal:
        start(folder)
    assert str(refusal.value).startswith(f"'{folder / file}' cannot be used: {says}")
    assert BARE.search(str(refusal.value)) is None


@pytest.mark.parametrize("file", [TOKENS, MAP, "added_tokens.json", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "7"])
def test_a_file_of_something_else_is_named(folder: Path, file: str, content: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(StartupError, match=f"^'{folder / file}' cannot be used: ") as refusal:
        start(folder)
    assert BARE.search(str(refusal.value)) is None


@pytest.mark.parametrize("change", [{"version": None}, {"added_tokens": {}}, {"model": {"type": "BPE"}}])
def test_a_part_of_a_tokenizer_that_the_library_cannot_read_is_named_by_its_place(
    folder: Path, change: dict[str, Any]
) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StartupError, match=rf"^'{path}' cannot be used: .* at line 1 column \d+\.$"):
        start(folder)


def others(sound: Path, file: str) -> Iterator[tuple[str, bytes]]:
    content = (sound / file).read_bytes() if (sound / file).exists() else b"{}"
    return with_other_kinds(file, content)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("file", [TOKENS, MAP, "config.json"])
def test_no_kind_of_value_ends_a_start_in_a_bare_error(folder: Path, sound: Path, file: str, part: int) -> None:
    refusals = {}
    num_served = 0
    for what, content in islice(others(sound, file), part, None, 4):
        (folder / file).write_bytes(content)
        try:
            start(folder)
            num_served += 1
        except StartupError as refusal:
            refusals[what] = str(refusal)
    assert num_served > 0
    assert refusals
    assert {what: refusal for what, refusal in refusals.items() if BARE.search(refusal)} == {}


def test_null_is_allowed_for_all_settings_for_which_transformers_allows_it(folder: Path) -> None:
    not_null = {"added_tokens_decoder", "auto_map", "split_special_tokens"}
    change(folder / TOKENS, dict.fromkeys({*MORE_KEYS[TOKENS], "sep_token", "add_prefix_space"} - not_null))
    change(folder / MAP, dict.fromkeys(MORE_KEYS[MAP]))
    change(folder / "config.json", dict.fromkeys(("dtype", "id2label", "layer_types", "sliding_window")))
    start(folder)


def test_a_setting_that_is_not_read_may_have_any_value(folder: Path) -> None:
    change(folder / TOKENS, {"extra_special_tokens": ["<a>"], "additional_special_tokens": 77, "model_max_length": []})
    change(folder / "config.json", {"text_config": {"id2label": 7}})
    start(folder)


class Failing:
    name = "with an error"

    def accepts(self, _request: StartRequest) -> None:
        return None

    def start(self, _request: StartRequest) -> ServedModel:
        raise TypeError("must be real number, not str")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rms_norm_eps": "x"}, "the model's setting rms_norm_eps is 'x', but must be a number with a decimal point"),
        ({}, "TypeError: must be real number, not str"),
    ],
)
def test_a_way_that_fails_at_a_setting_that_transformers_refuses_names_it(
    folder: Path, settings: dict[str, Any], says: str
) -> None:
    change(folder / "config.json", settings)
    with pytest.raises(StartupError, match=f"^No model could be loaded from '{folder}': {says}$"):
        start_model(
            folder, EngineOptions(device="cpu"), StartTimes(), lambda: None, new_world(), ways=lambda: [Failing()]
        )


def test_weights_that_cannot_be_made_with_a_setting_name_it(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    random_model(config).save_pretrained(tmp_path)
    change(tmp_path / "config.json", {"num_experts": "x"})
    checkpoint = read_checkpoint(find_model(tmp_path), "small")
    with pytest.raises(StartupError) as refusal:
        load_weights(checkpoint, torch.float32)
    path = tmp_path / "config.json"
    assert str(refusal.value) == f"'{path}' cannot be used: its num_experts is \"x\", but must be an integer or null."


def test_errors_about_something_else_stay_as_they_are(folder: Path) -> None:
    change(folder / TOKENS, {"tokenizer_class": 77})
    for error in (StartupError("no"), KeyboardInterrupt("no")):
        with pytest.raises(type(error), match="^no$"), settings_named(folder):
            raise error
    with pytest.raises(ValueError, match="^no$"), settings_named(folder, ["config.json"]):
        raise ValueError("no")
