"""Answers to images and sounds are transformers' own, token by token, in every family."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray
from PIL import Image

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import ChatPrompt, Failed, Finished, PromptDone, Request, SamplingParams, TokenChunk
from oaiserve.engine.types.media import MediaFile
from oaiserve.errors import InvalidRequest
from oaiserve.plugins.media import plugin
from oaiserve.runtime import THREADS
from tests.engine.doubles import SimulatedEngine, new_world
from tests.models.pictures import picture, png, sine, wav
from tests.plugins.media.seeing import HEARING, KINDS, Media, SeeingModel, expected_answer, save_seeing

NUM_TOKENS = 8
FIRST = picture(1)
SECOND = picture(2, 90, 50)
MESSAGES = [
    {
        "role": "user",
        "content": [
            *({"type": "text", "text": "Hi <image> <|image_pad|>"}, {"type": "image"}),
            *({"type": "text", "text": "and"}, {"type": "image"}),
        ],
    }
]


class Answer(NamedTuple):
    prompt: list[int]
    token_ids: list[int]
    cached_tokens: int
    end: Finished


def file_of(medium: Image.Image | NDArray[np.float32]) -> MediaFile:
    return MediaFile("image", png(medium)) if isinstance(medium, Image.Image) else MediaFile("audio", wav(medium))


def ask(engine: Engine, media: Media, request_id: str, salt: str = "", messages: list[Any] = MESSAGES) -> Answer:
    """Return the greedy answer to messages with these images and sounds."""
    files = tuple(file_of(one) for one in media)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    request = Request(request_id, (ChatPrompt(messages, media=files),), params, cache_salt=salt)
    prompt: list[int] = []
    token_ids: list[int] = []
    cached = 0
    for event in engine.stream(request):
        match event:
            case PromptDone():
                prompt = list(event.token_ids)
                cached = event.cached_tokens
            case TokenChunk():
                token_ids += event.token_ids
            case Failed():
                raise event.error
    assert isinstance(event, Finished)
    return Answer(prompt, token_ids, cached, event)


def made_of(path: Path, *, compiled: bool = False, **options: Any) -> Engine:
    options = {"device": "cpu", "kv_blocks": 64, "block_size": 16, **options}
    world = new_world(THREADS.clock_ns)  # Encoding takes time.
    return SimulatedEngine.from_pretrained(
        path, compile=compiled, load_media=plugin.inner.media, runtime=world, **options
    )


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, SeeingModel, Engine]]:
    seeing = save_seeing(request.param, tmp_path)
    with made_of(tmp_path) as own:
        yield request.param, seeing, own


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_answers_to_images_are_those_of_transformers(engine: tuple[str, SeeingModel, Engine]) -> None:
    name, seeing, own = engine
    answer = ask(own, [FIRST, SECOND], "first")
    assert answer.token_ids == expected_answer(name, seeing, answer.prompt, [FIRST, SECOND], NUM_TOKENS)
    swapped = ask(own, [SECOND, FIRST], "swapped")
    assert swapped.token_ids == expected_answer(name, seeing, swapped.prompt, [SECOND, FIRST], NUM_TOKENS)
    assert swapped.token_ids != answer.token_ids, "the answers must be able to differ"
    vector_id = seeing.tokenizer.convert_tokens_to_ids(KINDS[name].vector)
    assert swapped.cached_tokens <= answer.prompt.index(vector_id)  # they share the text before the first image
    times = answer.end.times
    assert times.tokenized <= times.media_encoded <= times.scheduled
    usage = answer.end.usage
    account = answer.end.account
    assert usage.image_tokens == account.media.image_tokens == answer.prompt.count(vector_id)
    assert (account.media.num_images, account.media.num_cached, usage.audio_tokens) == (2, 0, 0)
    phases = {phase.name: phase.duration_ns for phase in times.ended(THREADS.clock_ns).phases()}
    assert 0 < account.media.encode_ns <= phases["encode_media"]
    assert account.media.encode_ns <= account.machine_ns
    assert sum(account.prefill_causes_ns.values()) == phases["prefill"]
    assert sum(account.decode_causes_ns.values()) == phases["decode"]


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4"])
def test_the_native_step_answers_as_transformers_does_and_so_does_a_start_from_the_start_cache(
    name: str, tmp_path: Path
) -> None:
    seeing = save_seeing(name, tmp_path)
    for _ in range(2):
        with made_of(tmp_path, compiled=True) as own:
            for media in ([FIRST, SECOND], [SECOND, FIRST]):
                answer = ask(own, media, "r")
                assert answer.token_ids == expected_answer(name, seeing, answer.prompt, media, NUM_TOKENS)


@pytest.mark.parametrize("engine", ["qwen3_vl"], indirect=True)
def test_a_second_turn_over_the_same_images_finds_their_blocks_and_vectors(
    engine: tuple[str, SeeingModel, Engine],
) -> None:
    _, _, own = engine
    first = ask(own, [FIRST, SECOND], "first")
    again = ask(own, [FIRST, SECOND], "again")
    assert again.token_ids == first.token_ids
    assert again.cached_tokens == (len(first.prompt) - 1) // 16 * 16
    assert (again.end.account.media.num_cached, again.end.account.media.encode_ns) == (2, 0)
    files = tuple(MediaFile("image", png(image)) for image in (FIRST, SECOND))
    work = own.encode(ChatPrompt(MESSAGES, media=files), 4096)
    assert own.run_in_turns(work, client="", num_bytes=0).result() == first.prompt
    salted = ask(own, [FIRST, SECOND], "salted", salt="other")
    assert salted.token_ids == first.token_ids
    assert salted.cached_tokens == 0  # it shares neither blocks nor vectors


@pytest.mark.parametrize("engine", ["llava"], indirect=True)
def test_what_is_no_image_or_has_no_place_is_refused_and_the_next_request_is_answered(
    engine: tuple[str, SeeingModel, Engine],
) -> None:
    _, _, own = engine
    with pytest.raises(InvalidRequest, match=r"are \[image\], for which .* template has places \[image, image\]"):
        ask(own, [FIRST], "one too few")
    files = (MediaFile("image", png(FIRST)), MediaFile("image", png(SECOND)[:99]))
    with pytest.raises(InvalidRequest, match="cut off, or damaged"):
        own.generate([ChatPrompt(MESSAGES, media=files)], SamplingParams(max_tokens=1))
    assert len(ask(own, [FIRST, SECOND], "right").token_ids) == NUM_TOKENS


LOW = sine(220, 0.5)
HIGH = sine(1900, 0.9)


def messages_of(media: Media) -> list[Any]:
    parts = [{"type": file_of(one).kind} for one in media]
    return [{"role": "user", "content": [{"type": "text", "text": "Hi <|AUDIO|>"}, *parts]}]


@pytest.mark.parametrize(("name", "more"), [("qwen2_audio", []), ("gemma4", [FIRST])])
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.compiler)])
def test_answers_to_sounds_are_those_of_transformers(name: str, more: Media, native: bool, tmp_path: Path) -> None:
    hearing = save_seeing(name, tmp_path, HEARING)
    id_of = hearing.tokenizer.convert_tokens_to_ids
    answers = []
    seen = 1 + len(more)
    cases = ([LOW, *more, HIGH], 0), ([HIGH, *more, LOW], 1 + seen), ([*more, LOW, HIGH[:1600]], seen)
    with made_of(tmp_path, compiled=native) as own:
        assert own.media == {"audio", *(["image"] if more else [])}
        for media, cached in cases:
            answer = ask(own, media, str(len(answers)), messages=messages_of(media))
            assert answer.token_ids == expected_answer(name, hearing, answer.prompt, media, NUM_TOKENS)
            account = answer.end.account
            assert (account.media.num_sounds, account.media.num_images, account.media.num_cached) == (
                2,
                len(more),
                cached,
            )
            assert answer.end.usage.audio_tokens == answer.prompt.count(id_of(HEARING[name].audio)) > 2
            answers.append(answer.token_ids)
        assert answers[0] != answers[1], "the answers must be able to differ"
        with pytest.raises(InvalidRequest, match="longer than 30 seconds"):
            ask(own, [sine(220, 30.1)], "long", messages=messages_of([LOW]))
        if more:
            with pytest.raises(InvalidRequest, match=r"are \[image, audio\], .* places \[audio, image\]"):
                ask(own, [FIRST, LOW], "in another order", messages=messages_of([LOW, FIRST]))
            with pytest.raises(InvalidRequest, match="too short"):
                ask(own, [LOW[:100]], "short", messages=messages_of([LOW]))


@pytest.mark.parametrize("name", HEARING)
def test_a_sound_that_is_too_loud_for_the_models_features_is_refused_and_the_next_one_is_answered(
    name: str, tmp_path: Path
) -> None:
    """Their squares, or sums of these, are beyond float32."""
    save_seeing(name, tmp_path, HEARING)
    content = io.BytesIO()
    soundfile.write(content, np.full(8000, 3e38, np.float32), 16_000, format="WAV", subtype="FLOAT")
    loud = MediaFile("audio", content.getvalue(), where="messages[0].content[1]")
    messages = messages_of([LOW])
    with made_of(tmp_path) as own:
        with pytest.raises(
            InvalidRequest, match=r"'messages\[0\].content\[1\]': the sound is too loud to compute with"
        ):
            own.generate([ChatPrompt(messages, media=(loud,))], SamplingParams(max_tokens=1))
        assert len(ask(own, [LOW], "then", messages=messages).token_ids) == NUM_TOKENS


def test_an_image_whose_vectors_are_not_finite_is_refused_and_texts_are_answered(tmp_path: Path) -> None:
    seeing = save_seeing("llava", tmp_path)
    with torch.no_grad():
        for layer in seeing.model.model.multi_modal_projector.children():
            if isinstance(layer, torch.nn.Linear):
                layer.weight *= 1e30
    seeing.model.save_pretrained(tmp_path)
    with made_of(tmp_path) as own:
        for request_id in ("first", "again"):  # What is not finite isn't cached.
            with pytest.raises(InvalidRequest, match="One image of this request leads to numbers that are not finite"):
                ask(own, [FIRST, SECOND], request_id)
        text = [{"role": "user", "content": "Hi"}]
        assert len(ask(own, [], "text", messages=text).token_ids) == NUM_TOKENS


@pytest.mark.parametrize("package", ["soundfile", "soxr"])
def test_without_a_package_of_sounds_a_model_reads_no_sound(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_seeing("gemma4", tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    assert made_of(tmp_path).media == {"image"}
    assert [record.message for record in caplog.records if "not read" in record.message] == [
        "Sounds are not read: the packages for them are missing; pip install 'oaiserve[audio]' "
        f"(import of {package} halted; None in sys.modules)"
    ]
