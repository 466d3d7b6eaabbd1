"""A GGUF file with a tower next to it answers about images like the folder that both were made from."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from oaiserve.checkpoints.source import find_mmproj, find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.model.transformers_files.wrapper import text_config
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.engine.types.media import MediaFile
from oaiserve.errors import InvalidRequest, StartupError
from oaiserve.plugins.media import plugin
from oaiserve.plugins.media.model.load import load_media
from oaiserve.plugins.media.model.mmproj import read_mmproj
from tests.engine.doubles import SimulatedEngine, new_world
from tests.models.gguf_records import Record
from tests.models.pictures import picture, png
from tests.plugins.media.mmproj_files import FAMILIES, save_folder, write_pair, write_tower
from tests.plugins.media.seeing import KINDS, expected_answer
from tests.plugins.media.test_answers import FIRST, NUM_TOKENS, SECOND, ask, made_of

MMPROJ = "mmproj-model-f16.gguf"


def vectors(path: Path, mmproj: Path | None = None, number: int = 3) -> torch.Tensor:
    """Return the vectors of a picture, one after the other."""
    options = EngineOptions(device="cpu", dtype="float32")
    media = load_media(StartRequest(find_model(path), options, new_world()), mmproj)
    assert media is not None
    prepared = media.reader.prepare(MediaFile("image", png(picture(number, 90, 50))), "")
    *_, encoded = media.tower.pieces(prepared.medium)
    assert encoded is not None
    return torch.cat([encoded.vectors, *encoded.deep])


# Positions of three axes and deep vectors reach the native step, too.
NATIVE = [pytest.param(name, True, marks=pytest.mark.compiler) for name in ("qwen2_5_vl", "qwen3_vl")]


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in sorted(FAMILIES)), *NATIVE])
def test_vectors_and_answers_are_those_of_the_folder_of_safetensors(name: str, compiled: bool, tmp_path: Path) -> None:
    seeing = save_folder(name, tmp_path / "folder")
    path = write_pair(name, seeing, tmp_path)
    expected = vectors(tmp_path / "folder")
    torch.testing.assert_close(vectors(path, tmp_path / MMPROJ), expected, rtol=1e-4, atol=1e-5)
    with made_of(path, compiled=compiled, dtype="float32") as engine:
        answer = ask(engine, [FIRST, SECOND], "first")
    assert answer.token_ids == expected_answer(name, seeing, answer.prompt, [FIRST, SECOND], NUM_TOKENS)
    vector = seeing.tokenizer.convert_tokens_to_ids(KINDS[name].vector)
    assert answer.end.usage.image_tokens == answer.prompt.count(vector) > 1


def test_the_tower_of_qwen3_5_is_that_of_qwen3_vl_without_deep_vectors(tmp_path: Path) -> None:
    seeing = save_folder("qwen3_5", tmp_path / "folder")
    write_tower("qwen3_5", seeing, tmp_path / MMPROJ)
    text = text_config(seeing.model.config)
    assert text is not None
    result = read_mmproj(tmp_path / MMPROJ, text, Tokenizer.from_pretrained(tmp_path / "folder"))
    assert result.config.model_type == "qwen3_5"
    own = {name: tensor for name, tensor in seeing.model.state_dict().items() if ".visual." in name}
    assert result.weights.keys() == own.keys()
    assert all(torch.equal(result.weights[name], tensor) for name, tensor in own.items())
    assert Record("qwen3_5_text").config().rope_axes == [0, 1, 2] * 10 + [0, 1]


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0])
def test_matrices_of_the_tower_may_have_fewer_bits(kind: Kind, tmp_path: Path) -> None:
    seeing = save_folder("idefics3", tmp_path / "folder")
    path = write_pair("idefics3", seeing, tmp_path, kind)
    actual_vectors = vectors(path, tmp_path / MMPROJ)
    expected = vectors(tmp_path / "folder")
    assert not torch.equal(actual_vectors, expected)
    assert (actual_vectors - expected).norm() < 0.05 * expected.norm()


def test_a_tower_of_another_width_is_refused_with_both_numbers(tmp_path: Path) -> None:
    seeing = save_folder("idefics3", tmp_path / "folder")
    other = tmp_path / "other"
    other.mkdir()
    wide = save_folder("idefics3", other, hidden_size=128)
    write_pair("idefics3", wide, other)
    path = write_pair("idefics3", seeing, tmp_path)
    with pytest.raises(StartupError, match=r"not of this model: it makes vectors of 128 numbers, .* text model has 64"):
        SimulatedEngine.from_pretrained(path, device="cpu", mmproj=other / MMPROJ, load_media=plugin.inner.media)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"idefics3", b"idefics9", "its projector is of the type idefics9"),
        (b"v.blk.0.ln1.bias", b"v.blk.0.ln9.bias", "it has a tensor 'v.blk.0.ln9.bias', which is not known"),
    ],
)
def test_a_tower_that_is_not_read_leaves_text_alone_and_says_so(
    old: bytes, new: bytes, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_pair("idefics3", save_folder("idefics3", tmp_path / "folder"), tmp_path)
    content = (tmp_path / MMPROJ).read_bytes()
    (tmp_path / MMPROJ).write_bytes(content.replace(old, new))
    with made_of(path, dtype="float32") as engine, pytest.raises(InvalidRequest, match="this model reads text alone"):
        ask(engine, [FIRST, SECOND], "refused")
    assert f"served for text alone: {reason}" in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"v.blk.0.ln1.weight", b"x.blk.0.ln1.weight", "has no weights for 1 tensors of its tower"),
        (b"mm.model.fc.weight", b"mm.model.fx.weight", "it has no tensor mm.model.fc.weight"),
        (b"clip.vision.image_size", b"clip.vision.image_sizx", "it has no number clip.vision.image_size"),
    ],
)
def test_a_tower_that_lacks_something_is_refused_by_its_name(
    old: bytes, new: bytes, reason: str, tmp_path: Path
) -> None:
    path = write_pair("idefics3", save_folder("idefics3", tmp_path / "folder"), tmp_path)
    (tmp_path / MMPROJ).write_bytes((tmp_path / MMPROJ).read_bytes().replace(old, new))
    with pytest.raises(StartupError, match=rf"mmproj-model-f16\.gguf' .*{reason}"):
        vectors(path, tmp_path / MMPROJ)


def test_a_file_of_the_flag_must_exist_and_one_beside_the_model_is_found_in_float16_first(tmp_path: Path) -> None:
    for name in ("model-Q8_0.gguf", "mmproj-model-bf16.gguf", "mmproj-model-f16.gguf"):
        (tmp_path / name).touch()
    model = find_model(tmp_path / "model-Q8_0.gguf")
    assert find_mmproj(model, None) == tmp_path / "mmproj-model-f16.gguf"
    assert find_mmproj(model, tmp_path / "mmproj-model-bf16.gguf") == tmp_path / "mmproj-model-bf16.gguf"
    with pytest.raises(StartupError, match=r"--mmproj is '.*none\.gguf', which does not exist"):
        find_mmproj(model, tmp_path / "none.gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match="only a GGUF file has such a file"):
        find_mmproj(find_model(tmp_path), tmp_path / "mmproj-model-bf16.gguf")
