"""The texts of images and sounds are those that transformers' processors make of them."""

from typing import Any

import pytest
import transformers

from oaiserve.engine.types.media import MediaFile, MediaLimits
from oaiserve.errors import InvalidRequest
from oaiserve.plugins.media.model.families import IMAGES, SOUNDS, Settings
from oaiserve.plugins.media.model.forms import Form
from tests.models.pictures import picture, png, sine
from tests.plugins.media.seeing import HEARING, KINDS

# The processors whose code can be called here: others import packages for videos.
PROCESSORS = {
    "smolvlm": "SmolVLMProcessor", "idefics3": "Idefics3Processor", "llava": "LlavaProcessor",
    "gemma3": "Gemma3Processor", "gemma4": "Gemma4Processor", "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor", "qwen3_5": "Qwen3VLProcessor",
    "internvl": "InternVLProcessor",
}  # fmt: skip


@pytest.mark.parametrize("size", [(60, 40), (90, 50), (30, 120), (28, 28)])
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_text_of_an_image_is_that_of_transformers(name: str, size: tuple[int, int]) -> None:
    kind = KINDS[name]
    family = IMAGES[name]
    images = getattr(transformers, kind.images)(**kind.of_images)
    settings = Settings(kind.settings, kind.named, images, kind.vector)
    fields: dict[str, Any] = dict(images(images=[picture(0, *size)], return_tensors="pt", **family.arguments(settings)))
    processor_type: Any = getattr(transformers, PROCESSORS[name])
    processor = processor_type.__new__(processor_type)
    attributes = {**kind.settings, **kind.named, "image_processor": images, "image_token": kind.vector}
    attributes |= {"fake_image_token": "<fake_token_around_image>", "global_image_tag": "<global-img>"}
    attributes["global_image_token"] = "<global-img>"
    if name == "gemma3":
        vectors = kind.vector * kind.settings["image_seq_length"]
        attributes["full_image_sequence"] = f"\n\n<start_of_image>{vectors}<end_of_image>\n\n"
    vars(processor).update(attributes)
    assert family.text(settings, fields) == processor.replace_image_token(fields, 0)


@pytest.mark.parametrize("size", [(1, 40), (40, 1)])
def test_an_image_is_not_enlarged_beyond_the_most_pixels(size: tuple[int, int]) -> None:
    """LLaVA's processor would make billions of pixels of a file with some kilobytes."""
    kind = KINDS["llava"]
    images = getattr(transformers, kind.images)(**kind.of_images)
    form = Form("image", IMAGES["llava"], Settings(kind.settings, {}, images, kind.vector), 0)
    file = MediaFile("image", png(picture(0, *size)), where="messages[0].content[1]")
    assert form.fields(file, MediaLimits(max_pixels=28 * 28 * 40))["pixel_values"].shape[2:] == (28, 28)
    with pytest.raises(InvalidRequest, match=r"content\[1\].* to 28 on its shorter side and 1120 on its longer one"):
        form.fields(file, MediaLimits(max_pixels=28 * 28 * 40 - 1))


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.234, 30.0])
@pytest.mark.parametrize("name", ["qwen2_audio", "gemma4"])
def test_the_text_of_a_sound_is_that_of_transformers(name: str, seconds: float) -> None:
    kind = HEARING[name]
    family = SOUNDS[name]
    sounds = getattr(transformers, kind.sounds)(feature_size=128)
    samples = sine(500, seconds)
    settings = Settings(kind.settings, kind.named, sounds, kind.audio)
    fields = dict(sounds([samples], sampling_rate=16_000, return_tensors="pt", **family.arguments(settings)))
    processor_type: Any = getattr(transformers, {"qwen2_audio": "Qwen2AudioProcessor"}.get(name, "Gemma4Processor"))
    processor = processor_type.__new__(processor_type)
    vars(processor).update({**kind.named, "feature_extractor": sounds, "audio_token": kind.audio})
    _, (text,) = processor._process_audio([samples], sampling_rate=16_000, return_tensors="pt")
    assert family.text(settings, fields) == text
