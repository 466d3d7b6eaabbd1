"""Starts a Whisper model: its encoder is the engine's tower, and its decoder computes the steps."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from oaiserve.checkpoints.load_errors import reported, tensors_named
from oaiserve.engine.encoder import Media
from oaiserve.engine.model.device import move, select_device
from oaiserve.engine.model.model_config import select_dtype
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.load import OF_WEIGHTS, config_of
from oaiserve.engine.start.request import StartRequest, needing_native
from oaiserve.engine.types.media import Encoded, MediaFile, MediaKind, Medium, Prepared, PromptMedia, Vectors
from oaiserve.engine.types.pooling import Pooling
from oaiserve.errors import StartupError
from oaiserve.plugins.speech.model.decoder import SpeechDecoder
from oaiserve.plugins.speech.model.runner import SpeechRunner
from oaiserve.plugins.speech.sound import NOT_INSTALLED
from oaiserve.plugins.speech.tokens import RATE, SAMPLES_PER_TOKEN
from oaiserve.system_cpus import default_threads

log = logging.getLogger(__name__)


def start(request: StartRequest) -> ServedModel:
    options = request.options
    name = request.source.location
    flag = options.adapters_flag if options.has_adapters else needing_native(options)
    if flag is not None:
        raise StartupError(f"{flag} is for models that generate text, and '{name}' transcribes speech.")
    if find_spec("av") is None:
        log.warning("Requests for '%s' will fail. %s", name, NOT_INSTALLED)
    model = request.load("weights", lambda: load(request))
    if model.device.type == "cpu":
        torch.set_num_threads(options.cpu_threads or default_threads())
    config: WhisperConfig = model.config
    decoder = SpeechDecoder(model, request.tokenizer)
    return ServedModel(
        tokenizer=request.tokenizer,
        runner=SpeechRunner(decoder),
        num_blocks=0,
        max_model_len=config.max_source_positions + config.max_target_positions,
        vocab_size=config.vocab_size,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        pooling=Pooling("transcribe", 0),
        media=Media(frozenset({"audio"}), SoundReader(), SpeechTower(model, features_of(request)), Vectors(0)),
    )


def load(request: StartRequest) -> WhisperForConditionalGeneration:
    """Load the weights. Raises StartupError."""
    source = request.source
    device = select_device(request.options.device)
    with reported(f"No model could be loaded from {source.shown}"), tensors_named():
        dtype = select_dtype(request.options.dtype, config_of(source), device, is_gguf=False, for_tensor_cores=True)
        # transformers' types do not know that it returns a pair.
        pair: Any = WhisperForConditionalGeneration.from_pretrained(source.location, dtype=dtype, **OF_WEIGHTS)
    model, report = pair
    if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise StartupError(f"'{source.location}' has no weights for {len(missing)} tensors, such as {missing[0]}.")
    move(model, device, source.location)
    loaded: WhisperForConditionalGeneration = model.eval()
    return loaded


def features_of(request: StartRequest) -> WhisperFeatureExtractor:
    """Return the maker of spectrograms that the model's files describe."""
    if (request.source.folder / "preprocessor_config.json").is_file():
        with reported(f"'{request.source.location}' cannot be served"):
            return WhisperFeatureExtractor.from_pretrained(request.source.location)
    config = config_of(request.source)
    return WhisperFeatureExtractor(feature_size=config.num_mel_bins)


class SoundReader:
    """Takes the samples of a window, which the route has decoded, as the last tokens of a prompt."""

    placeholders: Mapping[MediaKind, str] = {}

    def checked(self, files: Sequence[MediaFile]) -> list[MediaFile]:
        return list(files)

    def prepare(self, file: MediaFile, salt: str, *, only_text: bool = False) -> Prepared:
        assert isinstance(file.content, bytes)
        samples = file.content
        key = blake2b(samples, digest_size=16, salt=blake2b(salt.encode(), digest_size=16).digest()).digest()
        num_rows = -(-len(samples) // (2 * SAMPLES_PER_TOKEN))
        return Prepared(Medium("audio", key, num_rows, {"samples": samples}), "")

    def placed(self, token_ids: list[int], prepared: Sequence[Prepared]) -> PromptMedia:
        medium = prepared[0].medium
        end = len(token_ids)
        return PromptMedia((medium,), array("i", range(end - medium.num_rows, end)))


class SpeechTower:
    """Encodes windows of sound. A window is one piece of work: less than a second for the smaller models."""

    def __init__(self, model: WhisperForConditionalGeneration, features: WhisperFeatureExtractor) -> None:
        self._model = model
        self._features = features

    @torch.inference_mode()
    def pieces(self, medium: Medium) -> Iterator[Encoded | None]:
        samples = np.frombuffer(medium.inputs["samples"], "<i2").astype(np.float32) / 2**15
        spectrogram = self._features(samples, sampling_rate=RATE, return_tensors="pt").input_features
        encoder = self._model.get_encoder()
        vectors = encoder(spectrogram.to(self._model.device, self._model.dtype)).last_hidden_state
        yield Encoded(vectors)  # [1, T, hidden size]
