"""Texts and times of windows are those of transformers' own Whisper, on a small random model."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.request import Finished, Pooled, Request, SamplingParams, TokenPrompt
from oaiserve.engine.sequences.step import Chunk, Step, StepResult
from oaiserve.engine.start.task import find_task
from oaiserve.engine.types.media import MediaFile, Medium
from oaiserve.errors import StartupError
from oaiserve.plugin_loading import own_plugins, ways_of
from oaiserve.plugins.speech.model import decoder as speech
from oaiserve.plugins.speech.model.decoder import path_starts
from oaiserve.plugins.speech.tokens import RATE, SAMPLES_PER_TOKEN, WindowText
from tests.engine.doubles import SimulatedEngine
from tests.plugins.speech.spoken import IDS, write_whisper

NUMBERS = count()
OPTIONS = EngineOptions(device="cpu", cpu_threads=1)
SOUNDS = [
    (np.random.default_rng(number).standard_normal(RATE * seconds) * 3000).astype("<i2")
    for number, seconds in enumerate((4, 7, 3))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return WhisperForConditionalGeneration.from_pretrained(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    with SimulatedEngine.from_pretrained(str(folder), OPTIONS, ways=lambda: ways_of(own_plugins())) as engine:
        yield engine


def transcribed(
    engine: Any, *before: str, sounds: Any = SOUNDS, temperature: float = 0.0, **params: Any
) -> list[WindowText]:
    """Return the texts of sounds that one request has as its windows."""
    prompts = tuple(
        TokenPrompt(
            [*(IDS[name] for name in before), *[IDS["<|endoftext|>"]] * -(-len(each) // SAMPLES_PER_TOKEN)],
            "file",
            (MediaFile("audio", each.tobytes()),),
        )
        for each in sounds
    )
    settings = SamplingParams(max_tokens=0, temperature=temperature, **params)
    request = Request(f"request-{next(NUMBERS)}", prompts, settings)
    events = list(engine.stream(request))
    assert isinstance(events[-1], Finished), events[-1]
    assert events[-1].usage.audio_tokens == sum(-(-len(each) // SAMPLES_PER_TOKEN) for each in sounds)
    pooled = sorted((each for each in events if isinstance(each, Pooled)), key=lambda each: each.index)
    return [WindowText.read(each.vector) for each in pooled]


def ids_of(text: WindowText) -> list[int]:
    return [token.token_id for token in text.tokens]


def own_ids(reference: Any, folder: Path, samples: Any, *before_text: str) -> list[int]:
    """Return the tokens that transformers generates."""
    features = WhisperFeatureExtractor.from_pretrained(folder)
    spectrogram = features(samples.astype(np.float32) / 2**15, sampling_rate=RATE, return_tensors="pt").input_features
    before = torch.tensor([[IDS[name] for name in before_text]])
    settings = deepcopy(reference.generation_config)
    settings.return_timestamps = True
    settings.no_speech_threshold = None
    # Its own `generate` would go on with what follows the last timestamp.
    edits = reference._retrieve_logit_processors(settings, None, before.shape[1], 1, "cpu")
    plain = GenerationConfig(max_length=before.shape[1] + 24, eos_token_id=IDS["<|endoftext|>"], pad_token_id=0)
    out = GenerationMixin.generate(
        reference,
        spectrogram,
        decoder_input_ids=before,
        generation_config=plain,
        logits_processor=LogitsProcessorList(edits),
    )
    return [int(each) for each in out[0, before.shape[1] :] if each != IDS["<|endoftext|>"]]


@pytest.fixture
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept the first text of a window: transformers draws otherwise."""
    monkeypatch.setattr(speech, "TEMPERATURES", (0.0,))
    monkeypatch.setattr(speech, "SILENT_FROM", 2.0)


@pytest.mark.usefixtures("one_try")
@pytest.mark.parametrize("task", ["transcribe", "translate"])
def test_the_text_is_that_of_transformers(engine: Any, reference: Any, folder: Path, task: str) -> None:
    before = ("<|startoftranscript|>", "<|de|>", f"<|{task}|>")
    texts = transcribed(engine, *before)
    expected = [own_ids(reference, folder, each, *before) for each in SOUNDS]
    assert [ids_of(text) for text in texts] == expected
    assert len({tuple(ids) for ids in expected}) > 1
    assert {text.language_id for text in texts} == {IDS["<|de|>"]}


@pytest.mark.usefixtures("one_try")
def test_the_language_is_that_of_the_first_window(engine: Any, reference: Any, folder: Path) -> None:
    texts = transcribed(engine, "<|startoftranscript|>", "<|transcribe|>")
    features = WhisperFeatureExtractor.from_pretrained(folder)
    spectrogram = features(SOUNDS[0].astype(np.float32) / 2**15, sampling_rate=RATE, return_tensors="pt").input_features
    assert {text.language_id for text in texts} == {int(reference.detect_language(spectrogram)[0])}


@pytest.mark.usefixtures("one_try")
def test_a_window_has_the_same_numbers_in_any_company(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>")
    sounds = [each[: RATE // 2] for each in SOUNDS]
    alone = [transcribed(engine, *before, sounds=[each], pooled_as="token_times")[0] for each in sounds]
    runner = engine._loop._model.runner
    launch = runner.launch
    chunks: list[Chunk] = []

    def kept(step: Step) -> StepResult:
        chunks.extend(step.chunks)
        return launch(step)

    monkeypatch.setattr(runner, "launch", kept)
    assert transcribed(engine, *before, sounds=sounds, pooled_as="token_times") == alone
    assert [WindowText.read(each.vector) for each in launch(Step(chunks)).chunks] == alone


@pytest.mark.usefixtures("one_try")
def test_a_window_is_encoded_when_the_text_before_it_is_there(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine._loop._model
    pieces = model.media.tower.pieces
    launch = model.runner.launch
    done = []

    def encoded(medium: Medium) -> Iterator[Any]:
        done.append("encoded")
        engine.world.sleep(1.0)  # longer than the encoder works without a break
        yield from pieces(medium)

    def decoded(step: Step) -> StepResult:
        done.extend(["decoded"] * len(step.chunks))
        return launch(step)

    monkeypatch.setattr(model.media.tower, "pieces", encoded)
    monkeypatch.setattr(model.runner, "launch", decoded)
    sounds = [each[: RATE // 2] for each in SOUNDS]
    transcribed(engine, "<|startoftranscript|>", "<|en|>", "<|transcribe|>", sounds=sounds)
    assert done == ["encoded", "decoded"] * len(sounds)


@pytest.mark.usefixtures("one_try")
def test_a_text_before_the_speech_is_read(engine: Any) -> None:
    plain = transcribed(engine, "<|startoftranscript|>", "<|en|>", "<|transcribe|>")
    before = ("<|startofprev|>", "<|nospeech|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>")
    assert [ids_of(text) for text in transcribed(engine, *before)] != [ids_of(text) for text in plain]


@pytest.mark.usefixtures("one_try")
def test_a_model_for_english_alone_has_neither_languages_nor_tasks(tmp_path: Path) -> None:
    folder = write_whisper(tmp_path, has_languages=False)
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    with SimulatedEngine.from_pretrained(str(folder), OPTIONS, ways=lambda: ways_of(own_plugins())) as engine:
        (text,) = transcribed(engine, "<|startoftranscript|>", "<|en|>", "<|translate|>", sounds=SOUNDS[:1])
    assert ids_of(text) == own_ids(model, folder, SOUNDS[0], "<|startoftranscript|>")
    assert text.language_id == -1


@pytest.mark.usefixtures("one_try")
def test_tokens_have_times_within_the_window(engine: Any) -> None:
    for text, sound in zip(
        transcribed(engine, "<|startoftranscript|>", "<|en|>", "<|transcribe|>", pooled_as="token_times"),
        SOUNDS,
        strict=True,
    ):
        spoken = [token for token in text.tokens if token.token_id < IDS["<|endoftext|>"]]
        assert spoken
        times = [time for token in spoken for time in (token.start, token.end)]
        assert times == sorted(times)
        assert 0 <= times[0] < times[-1] <= len(sound) / RATE


def test_draws_follow_the_seed(engine: Any) -> None:
    before = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>")
    first, again, other = (
        [*map(ids_of, transcribed(engine, *before, temperature=1.0, seed=seed))] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_an_unlikely_text_is_decoded_again_with_a_temperature(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "LEAST_LOGPROB", 1.0)
    monkeypatch.setattr(speech, "SILENT_FROM", 2.0)
    texts = transcribed(engine, "<|startoftranscript|>", "<|en|>", "<|transcribe|>", sounds=SOUNDS[:1])
    assert [text.temperature for text in texts] == [1.0]
    assert transcribed(engine, "<|startoftranscript|>", "<|en|>", "<|transcribe|>", sounds=SOUNDS[:1]) == texts


def test_a_window_without_speech_has_no_text(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "LEAST_LOGPROB", 1.0)
    monkeypatch.setattr(speech, "SILENT_FROM", -1.0)
    (text,) = transcribed(engine, "<|startoftranscript|>", "<|en|>", "<|transcribe|>", sounds=SOUNDS[:1])
    assert (text.tokens, text.temperature) == ([], 0.0)


def test_a_sound_that_makes_no_numbers_fails_alone(engine: Any) -> None:
    model = engine._loop._model.runner._decoder.model  # no request can reach the weights
    weight = model.model.encoder.layer_norm.weight
    before = weight.clone()
    with torch.no_grad():
        weight[0] = torch.nan
    try:
        with pytest.raises(AssertionError, match="no usable numbers"):
            transcribed(engine, "<|startoftranscript|>", "<|en|>", "<|transcribe|>", sounds=SOUNDS[:1])
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert transcribed(engine, "<|startoftranscript|>", "<|en|>", "<|transcribe|>", sounds=SOUNDS[:1])


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 3), (9, 40)])
def test_the_cheapest_path_is_that_of_transformers(shape: tuple[int, int]) -> None:
    costs = np.random.default_rng(sum(shape)).standard_normal(shape)
    rows, columns = _dynamic_time_warping(costs)
    expected = [int(columns[rows == row][0]) for row in range(shape[0])]
    assert path_starts(costs).tolist() == expected


def test_the_task_is_found_and_flags_for_text_are_refused(folder: Path) -> None:
    assert find_task(find_model(str(folder)), "auto") == "transcribe"
    with pytest.raises(StartupError, match="--kv-cache-dtype int8 is for models that generate text"):
        SimulatedEngine.from_pretrained(
            str(folder), EngineOptions(device="cpu", kv_cache_dtype="int8"), ways=lambda: ways_of(own_plugins())
        )
