"""Images and sounds are decoded as transformers does it, and hostile files are refused with the reason."""

import io
import os
import signal
import struct
import subprocess
import sys
import zlib
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.image_utils import load_image

from oaiserve.engine.types.media import Detail, MediaFile, MediaLimits
from oaiserve.errors import InvalidRequest
from oaiserve.plugins.media.model import decode
from oaiserve.plugins.media.model.decode import decode_image, decode_sound, image_size
from oaiserve.plugins.media.model.families import IMAGES, Settings
from oaiserve.plugins.media.model.forms import Form
from oaiserve.plugins.media.model.reader import FileReader
from oaiserve.plugins.media.model.sound_process import resampled, samples_of
from oaiserve.plugins.shared.decoding_process import NICENESS, Refused
from tools.attack.media_files import IMAGES as BOMBS

WHERE = "messages[0].content[1]"
ORIENTATION = 0x0112


def noise(mode: str = "RGB", size: tuple[int, int] = (60, 40)) -> Image.Image:
    levels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(levels).convert(mode)


def saved(image: Image.Image, form: str, **more: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **more)
    return file.getvalue()


def image_of(
    content: bytes | str, detail: Detail = "auto", *, pixels: int = 10**6, most_bytes: int = 10**6
) -> Image.Image:
    return Image.fromarray(decode_image(MediaFile("image", content, detail, where=WHERE), pixels, most_bytes))


def refusal(content: bytes | str, **limits: int) -> str:
    with pytest.raises(InvalidRequest) as caught:
        image_of(content, **limits)
    assert caught.value.param == "messages"
    return caught.value.message.removeprefix(f"Invalid '{WHERE}': ")


@pytest.mark.filterwarnings("ignore")  # Pillow warns of a palette with transparency
@pytest.mark.parametrize(
    ("form", "mode"),
    [
        *(("PNG", mode) for mode in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "I;16")),
        *(("JPEG", mode) for mode in ("L", "RGB", "CMYK", "YCbCr")),
        *(("WEBP", mode) for mode in ("RGB", "RGBA")),
        *(("GIF", mode) for mode in ("L", "P", "RGBA")),
        *(("BMP", mode) for mode in ("1", "L", "P", "RGB", "RGBA")),
        *(("TIFF", mode) for mode in ("L", "RGB", "RGBA", "CMYK", "F")),
    ],
)
def test_an_image_has_the_pixels_that_transformers_reads(form: str, mode: str) -> None:
    exif = Image.Exif()
    image = noise("L").convert("I").convert("I;16") if mode == "I;16" else noise(mode if mode != "PA" else "RGBA")
    if mode == "PA":
        image = image.quantize()
    for orientation in range(1, 9):
        exif[ORIENTATION] = orientation
        content = saved(image, form, **({"exif": exif} if form in ("PNG", "JPEG", "WEBP", "TIFF") else {}))
        in_base64 = b64encode(content).decode()
        expected = load_image(in_base64)
        for data in (content, in_base64):
            assert np.array_equal(np.asarray(image_of(data)), np.asarray(expected))


def test_an_animation_is_its_first_frame_however_many_there_are() -> None:
    frames = [noise("L", (8, 8)), *(Image.new("L", (8, 8), level) for level in range(200))]
    content = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(np.asarray(image_of(content)), np.asarray(frames[0].convert("RGB")))


def test_low_detail_makes_an_image_smaller_and_keeps_its_shape() -> None:
    content = saved(noise(size=(1024, 700)), "PNG")
    limits = {"pixels": 10**6, "most_bytes": 10**7}
    assert image_of(content, "low", **limits).size == (512, 350)
    assert image_of(content, "high", **limits).size == (1024, 700)
    assert image_of(saved(noise(size=(9, 300)), "PNG"), "low").size == (9, 300)


TRANSPARENT = {
    "RGBA": noise("RGBA"),
    "LA": noise("LA"),
    "P": noise("RGBA").quantize(),
    "RGB": noise("RGB"),  # with one color that is transparent
    "L": noise("L"),
}


@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("mode", TRANSPARENT)
@pytest.mark.parametrize("converts", [True, False, None])
def test_what_is_transparent_has_the_color_that_the_models_processor_gives_it(mode: str, converts: bool | None) -> None:
    one_color = {"RGB": tuple(noise("RGB").getpixel((0, 0))), "L": noise("L").getpixel((0, 0))}  # type: ignore[arg-type]
    more = {"transparency": one_color[mode]} if mode in one_color else {}
    content = saved(TRANSPARENT[mode].resize((60, 200)), "PNG", **more)
    image = Image.open(io.BytesIO(content))
    assert image.has_transparency_data
    processor = Qwen2VLImageProcessorPil(do_convert_rgb=converts)
    form = Form("image", IMAGES["qwen2_vl"], Settings({}, {}, processor, "<|image_pad|>"), 0)
    actual = form.fields(MediaFile("image", content), MediaLimits())
    expected = processor(images=[image if converts else image.convert("RGB")], return_tensors="pt")
    assert torch.equal(actual["pixel_values"], expected["pixel_values"])


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_images_that_are_too_much_are_refused_before_they_are_decoded() -> None:
    limit = "(--max-image-pixels). Send a smaller one."
    assert refusal(png(1001, 1000)) == f"the image has 1001 x 1000 pixels, but at most 1000000 are decoded {limit}"
    assert refusal(png(2**31 - 1, 2**31 - 1)) == f"the image has far more than 1000000 pixels {limit}"
    assert refusal(bytes(1001), most_bytes=1000) == "the file has more than 1000 bytes."
    assert refusal(b64encode(bytes(1010)).decode(), most_bytes=1000) == "the file has more than 1000 bytes."


@pytest.mark.parametrize(
    ("size", "more", "expected"),
    [
        ((1000, 1000), {}, (1000, 1000)),
        ((1001, 1000), {}, (501, 500)),
        ((1001, 1000), {"form": "MPO"}, (501, 500)),
        ((1999, 2000), {}, (1000, 1000)),
        ((2001, 1999), {}, (501, 500)),  # a half would have a few too many
        ((2001, 2000), {}, None),
        ((1200, 1000), {"progressive": True}, None),
    ],
)
def test_a_large_photo_is_decoded_at_a_fraction_of_its_size(
    size: tuple[int, int], more: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    gradient = Image.linear_gradient("L").resize(size).convert("RGB")
    content = saved(gradient, **{"form": "JPEG", "exif": exif, **more})
    if expected is None:
        assert "are decoded (--max-image-pixels)" in refusal(content)
        return
    actual = image_of(content)
    assert actual.size == image_size(MediaFile("image", content), 10**6, 10**6)[::-1] == expected[::-1]
    upright = gradient.transpose(Image.Transpose.ROTATE_270).resize(actual.size, Image.Resampling.BOX)
    assert np.abs(np.asarray(actual, np.int16) - np.asarray(upright, np.int16)).max() < 8


def test_the_images_of_a_prompt_have_a_limit_of_pixels_together_before_any_is_decoded() -> None:
    reader = FileReader({}, SimpleNamespace(get_text_config=dict), SimpleNamespace(), MediaLimits(max_pixels=1000))
    one = MediaFile("image", png(100, 10))
    broken = MediaFile("image", png(100, 11))
    sound = MediaFile("audio", b64encode(b"not read").decode())
    assert [file.content for file in reader.checked([one] * 16 + [sound])] == [one.content] * 16 + [b"not read"]
    with pytest.raises(InvalidRequest, match="have 17000 pixels together, but at most 16000 are decoded for a request"):
        reader.checked([one] * 17)
    with pytest.raises(InvalidRequest, match="100 x 11 pixels"):
        reader.checked([one, broken])


@pytest.mark.parametrize("name", ["JPEG of fill bytes", "TIFF with a wide tile", "PNG of zipped texts"])
def test_a_bomb_is_refused_and_the_next_image_is_decoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.attack.media_files.FULL_BYTES", 12 * 2**20)
    reason = refusal(BOMBS[name](), most_bytes=2**24)
    assert ("too much time or memory" in reason) == (name == "JPEG of fill bytes"), reason
    assert image_of(saved(noise(), "PNG")).size == (60, 40)


def test_a_decoder_that_crashes_ends_no_more_than_its_own_image(monkeypatch: pytest.MonkeyPatch) -> None:
    content = saved(noise(), "PNG")
    assert image_of(content).size == (60, 40)
    process = decode._idle.pop()
    os.kill(process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patched:
        patched.setattr(decode, "_taken", lambda: process)
        under_way = pool.submit(refusal, content)
        process.kill()
        assert "takes too much time or memory" in under_way.result()
    assert image_of(content).size == (60, 40)
    (process,) = decode._idle
    process.kill()
    process.wait()
    assert image_of(content).size == (60, 40)


def test_a_decoder_gets_less_of_a_core_than_the_server_and_no_ctrl_c() -> None:
    image_of(saved(noise(), "PNG"))
    pid = decode._idle[-1].pid
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + NICENESS)
    # Linux compares niceness within a session, and sends Ctrl-C to a process group.
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid


def test_what_is_no_image_is_refused_with_the_reason() -> None:
    kinds = "the image cannot be read as PNG, JPEG, WEBP, GIF, BMP or TIFF: "
    whole = saved(noise(), "PNG")
    assert refusal(whole[: len(whole) // 2]) == f"{kinds}it is cut off, or damaged."
    assert refusal(b"") == refusal(b"<svg/>") == f"{kinds}it is none of these."
    assert refusal(saved(noise(), "PPM")) == f"{kinds}it is none of these."
    for text in ("a", "ab=c", "====", "aGVsbG8=aGVsbG8=", "b\u00e4", "aGVsb%zz8=", "aGVsbG8!"):
        assert refusal(text).startswith("the file is not valid base64: ")


def wave(seconds: float = 0.5, rate: int = 16000, hertz: float = 440) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate).astype(np.float32) / 2


def sound(samples: np.ndarray, rate: int, form: str = "WAV", **more: object) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, **more)
    return file.getvalue()


@pytest.mark.parametrize("form", ["WAV", "FLAC", "MP3"])
@pytest.mark.parametrize("rate", [16000, 44100])
def test_a_sound_is_the_mean_of_its_channels_at_the_rate_that_is_asked_for(form: str, rate: int) -> None:
    both = np.stack((wave(1, rate), wave(1, rate, 660)), axis=1)
    actual = samples_of(sound(both, rate, form), 16000, 60)
    expected = (wave(1) + wave(1, hertz=660)) / 2
    assert abs(len(actual) - len(expected)) < 3000  # an MP3 has whole frames
    assert np.abs(actual[1000:15000] - expected[1000:15000]).max() < (0.02 if form == "MP3" else 1e-3)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 11025, 44101])
def test_a_new_rate_keeps_what_it_can_and_drops_what_it_cannot_have(rate: int) -> None:
    def at_16000(hertz: float) -> np.ndarray:
        whole = wave(1, rate, hertz)
        return np.concatenate(list(resampled(np.split(whole, [10, 11, 3000]), rate, 16000)))

    below = at_16000(3000)
    assert np.abs(below - wave(1, hertz=3000)[: len(below)])[500:-500].max() < 1e-4
    assert len(below) == 16000
    if rate > 2 * 9000:
        assert np.abs(at_16000(9000))[500:-500].max() < 1e-4


def test_the_mean_of_the_loudest_channels_is_a_number() -> None:
    loudest = sound(np.full((100, 16), 3e38, np.float32), 16000, subtype="FLOAT")
    assert (samples_of(loudest, 16000, 60) == np.float32(3e38)).all()


def test_a_sound_is_decoded_in_a_process_of_its_own() -> None:
    result = decode_sound(
        MediaFile("audio", b64encode(sound(wave(), 16000, subtype="FLOAT")).decode()), 16000, 1, 10**6
    )
    assert np.array_equal(result, wave())
    with pytest.raises(
        InvalidRequest, match=r"Invalid 'messages\[0\].content\[1\]': the sound is longer than 0.1 seconds."
    ):
        decode_sound(MediaFile("audio", sound(wave(), 16000), where=WHERE), 16000, 0.1, 10**6)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read as WAV, FLAC or MP3: it is none of these, cut off, or damaged"),
        (sound(wave(), 16000, "OGG"), "must be WAV, FLAC or MP3, got OGG"),
        (sound(wave(), 1000), "must have 4000 to 96000 samples per second, got 1000"),
        (sound(np.zeros((10, 17), np.float32), 8000), "must have at most 16 channels, got 17"),
        (sound(np.full(10, np.nan, np.float32), 8000, subtype="FLOAT"), "has samples that are not numbers"),
        (sound(np.full(10, 1e300), 8000, subtype="DOUBLE"), "has samples that are not numbers"),
        (sound(np.repeat(np.float32([3e38, -3e38]), 99), 44100, subtype="FLOAT"), "is too loud to compute with: .*"),
        (sound(np.zeros(0, np.float32), 8000), "has no samples"),
        (sound(np.zeros(96000 * 30, np.float32), 96000, "FLAC"), "is longer than 20 seconds"),
    ],
)
def test_what_is_no_sound_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    with pytest.raises(Refused, match=f"^{reason}$"):
        samples_of(content, 16000, 20)


def test_spoiled_files_are_decoded_or_refused_in_bounded_time_and_memory() -> None:
    command = [sys.executable, "-m", "tests.plugins.media.hostile", "--files", "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "\n")
    assert done.stdout.count("\n") == 2 + 9
