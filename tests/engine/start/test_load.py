"""A folder of a model that cannot be loaded, or would run code, is refused in one sentence by whatever reads it."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oaiserve.checkpoints.soundness import refuse_unless_sound
from oaiserve.checkpoints.source import find_model
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.text import jinja_template
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from tests.engine.decoder.test_expert_logits import TOLERANCE, error_of_files
from tests.engine.doubles import SimulatedEngine
from tests.engine.remembered import OPTIONS, answer, save
from tests.models.decoders import FAMILIES, byte_tokenizer, random_model
from tests.models.described import model_of_files
from tests.models.packed import Packing, save_in_mxfp4, write_checkpoint
from tests.models.pinned import model_with_numbers
from tests.models.small_configs import config_of
from tests.models.wrappers import save_wrapper

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = FAMILIES["llama"].to_dict() | {"vocab_size": len(byte_tokenizer())}
    return save(random_model(type(FAMILIES["llama"])(**config)), tmp_path_factory.mktemp("sound"))


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """Return a folder with a small model, and with code of its own that makes a file where it runs."""
    copied = shutil.copytree(sound, tmp_path / "model")
    (copied / "custom_generate").mkdir()
    for name in ("own.py", "custom_generate/generate.py"):
        (copied / name).write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    return copied


def changed(name: str, **values: Any) -> Spoil:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def config(**values: Any) -> Spoil:
    return changed("config.json", **values)


def written(name: str, content: str | bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def load(folder: Path) -> None:
    refuse_unless_sound(find_model(folder))
    Tokenizer.from_pretrained(folder)
    model_of_files(folder)


def test_the_models_own_code_does_not_run_where_transformers_has_code_for_it(folder: Path, tmp_path: Path) -> None:
    config(auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})(folder)
    changed("generation_config.json", custom_generate="own")(folder)
    (folder / "pytorch_model.bin").write_bytes(b"no weights, and not opened")
    load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "spoil",
    [
        written("tokenizer.json", "{"),
        written("tokenizer.json", b""),
        written("tokenizer.json", "[]"),
        written("tokenizer.json", b"\xff" * 100),
        written("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": [["q", "z"]]}}'),
        written("tokenizer_config.json", "[]"),
        written("generation_config.json", "[]"),
        written("chat_template.jinja", "{% for %}"),
        config(auto_map=7),
        config(model_type=["llama"]),
        config(model_type=None),
        config(num_attention_heads=7),
        config(num_key_value_heads=0),
        config(num_key_value_heads=3),
        config(num_hidden_layers="1000000000"),
        config(vocab_size=5),
        config(head_dim=-8),
        config(rms_norm_eps=float("inf")),
        config(rope_parameters={"rope_type": "default", "rope_theta": 0}),
        config(rope_parameters=[1]),
        config(dtype="nosuch"),
        *(config(dtype=wrong) for wrong in ("load", 4, [], {}, ["float32"], [[[[]]]])),
        config(hidden_act="nosuch"),
        *(changed("generation_config.json", eos_token_id=wrong) for wrong in ("2", 2.0, [[2]], {})),
    ],
)
def test_what_is_broken_or_absurd_is_one_sentence(folder: Path, spoil: Spoil) -> None:
    spoil(folder)
    with pytest.raises(StartupError) as caught:
        SimulatedEngine.from_pretrained(folder, device="cpu", kv_blocks=64)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "100000"}}, 'its rope_theta is "100000", but must'),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "its rope_type is 'spiral', which"),
        ({"hidden_act": "nosuch"}, "its hidden_act is 'nosuch', which transformers doesn't know"),
        ({"hidden_size": "32"}, 'its hidden_size is "32", but must be an integer'),
        ({"rms_norm_eps": "1e-5"}, "setting rms_norm_eps is '1e-5', but must be a number"),
        ({"tie_word_embeddings": "false"}, "setting tie_word_embeddings is 'false', but must be true or false"),
        ({"eos_token_id": "2"}, "setting eos_token_id is '2', but must be an integer or a list of integers or null"),
        ({"dtype": "nosuch"}, "setting dtype is 'nosuch', but must be one of torch's"),
        ({"sliding_window": 2**64}, "its sliding_window is 1.84467e+19, but can be at most"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named(folder: Path, change: dict[str, Any], says: str) -> None:
    config(**change)(folder)
    with pytest.raises(StartupError, match=re.escape(says)) as caught:
        SimulatedEngine.from_pretrained(folder, **OPTIONS)
    assert "Error" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"vendor_note": 2**64},
        {"architectures": 7},
        {"intermediate_size": 0},
        {"pad_token_id": 10**12},
        {"_attn_implementation": "somebody/attention"},
        {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}},
    ],
)
def test_settings_that_nothing_reads_change_no_answer(
    folder: Path, sound: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    config(**change)(folder)
    assert answer(folder, **OPTIONS) == answer(sound, **OPTIONS)
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return a function that gives the reports of tensors that transformers has logged."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return lambda: [record.message for record in caplog.records if record.name == "transformers.modeling_utils"]


def test_weights_that_are_missing_are_not_made_up(folder: Path, reports: Callable[[], list[str]]) -> None:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    config(num_hidden_layers=layers + 1, layer_types=None)(folder)
    with pytest.raises(
        StartupError, match=rf"has no weights for 9 of the tensors .* such as model\.layers\.{layers}\.input"
    ):
        model_of_files(folder)
    assert reports() == []
    config(architectures=["LlamaForTokenClassification"])(folder)
    with pytest.raises(StartupError, match="Its architecture is LlamaForTokenClassification, which generates no text"):
        model_of_files(folder)


def test_end_tokens_that_the_model_cannot_produce_do_not_count(folder: Path) -> None:
    changed("generation_config.json", eos_token_id=[2, 10**6])(folder)
    with SimulatedEngine.from_pretrained(folder, **OPTIONS) as engine:
        (completion,) = engine.generate([[5, 9]], SamplingParams(max_tokens=3, min_tokens=3))
    assert len(completion.token_ids) == 3


def test_mxfp4_weights_are_expanded_to_bfloat16(tmp_path: Path) -> None:
    asked = config_of("gpt_oss", intermediate_size=32, dtype="bfloat16")
    expected = save_in_mxfp4(random_model(asked, dtype=torch.bfloat16), tmp_path)
    refuse_unless_sound(find_model(tmp_path))
    actual = dict(model_of_files(tmp_path, torch.bfloat16).named_parameters())
    assert len(expected) == 6
    for name, numbers in expected.items():
        assert actual[name].dtype == torch.bfloat16
        torch.testing.assert_close(actual[name].float(), numbers, rtol=0, atol=0)


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_padding_token_of_youtu_has_the_row_of_its_files(is_packed: bool, tmp_path: Path) -> None:
    model = model_with_numbers(config_of("youtu", pad_token_id=10))  # The compared text has this token.
    if is_packed:
        write_checkpoint(tmp_path, model, Packing("awq", group_size=-1))
    else:
        model.save_pretrained(tmp_path)
    loaded = model_of_files(tmp_path)
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    if not is_packed:
        assert error_of_files(model, tmp_path) < TOLERANCE


def test_tensors_that_are_not_read_are_reported_unless_they_are_of_images(
    folder: Path, tmp_path: Path, reports: Callable[[], list[str]]
) -> None:
    save_wrapper("llava", tmp_path / "wrapper")
    model_of_files(tmp_path / "wrapper")
    assert reports() == []
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.more": torch.zeros(4)}, folder / "model.safetensors", {"format": "pt"})
    model_of_files(folder)
    (report,) = reports()
    assert "model.more" in report


def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, reports: Callable[[], list[str]]) -> None:
    asked = config_of("gpt_oss", intermediate_size=32, dtype="bfloat16")
    save_in_mxfp4(random_model(asked, dtype=torch.bfloat16), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in (0, 1):
        del tensors[f"model.layers.{layer}.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        StartupError, match=r"loaded: model\.layers\.\{0, 1\}\.mlp\.experts\.down_proj: not as the model"
    ):
        model_of_files(tmp_path)
    assert reports() == []


def test_a_chat_template_that_does_not_end_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_template, "MOST_RENDER_NS", 10_000_000)
    loop = "{% for a in range(99999) %}{% for b in range(100) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)
    with pytest.raises(StartupError, match="it would take more than"):
        Tokenizer.from_pretrained(folder)
