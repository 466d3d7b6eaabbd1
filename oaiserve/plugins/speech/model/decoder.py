"""Decodes the text of encoded windows with transformers' Whisper, and finds when each token is spoken."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperForConditionalGeneration,
    WhisperTimeStampLogitsProcessor,
)
from transformers.modeling_outputs import BaseModelOutput

from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.plugins.speech.tokens import TOKENS_PER_SECOND, SpokenToken, WindowText

# As in openai's Whisper: a text that fails a limit is decoded again at the next temperature.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MOST_COMPRESSION = 2.4
LEAST_LOGPROB = -1.0
SILENT_FROM = 0.6  # probability from which a window with an unlikely text has no speech
_MULTILINGUAL_SIZE = 51_865  # size of the smallest vocabulary with languages
_FILTER_WIDTH = 7  # width of the median filter for attention weights over time


@dataclass(frozen=True, slots=True)
class Window:
    """An encoded window, and the tokens before its text."""

    vectors: Tensor  # [1, T, hidden size]
    prompt: tuple[int, ...]  # ends with the task
    temperature: float
    seed: int
    num_rows: int  # positions of the encoder that are sound, and not padding


@dataclass(frozen=True, slots=True)
class _Text:
    ids: list[int]
    average_logprob: float
    no_speech: float
    temperature: float


class SpeechDecoder:
    """Decodes windows with one model. Only the engine thread calls it."""

    def __init__(self, model: WhisperForConditionalGeneration, tokenizer: Tokenizer) -> None:
        self.model = model
        self._tokenizer = tokenizer
        settings: Any = model.generation_config
        config: Any = model.config
        self._settings = settings
        # Its name differs between versions of transformers.
        parameters = signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        ids = tokenizer.special_token_ids
        self._end_id: int = config.eos_token_id
        # The files of some models lack these settings, which follow from the vocabulary.
        if getattr(settings, "no_timestamps_token_id", None) is None:
            settings.no_timestamps_token_id = ids["<|notimestamps|>"]
        self._no_timestamps_id: int = settings.no_timestamps_token_id
        is_multilingual = getattr(settings, "is_multilingual", config.vocab_size >= _MULTILINGUAL_SIZE)
        languages = range(ids["<|startoftranscript|>"] + 1, ids["<|translate|>"]) if is_multilingual else ()
        self.languages: list[int] = [*languages]
        self._first_time_id = self._no_timestamps_id + 1
        self._most_tokens: int = config.max_target_positions
        heads = getattr(settings, "alignment_heads", None)
        if heads is None:  # as openai's Whisper does without a list
            layers = range(config.decoder_layers // 2, config.decoder_layers)
            heads = [(layer, head) for layer in layers for head in range(config.decoder_attention_heads)]
        self._heads = [(int(layer), int(head)) for layer, head in heads]

    @torch.inference_mode()
    def language_of(self, vectors: Tensor, start_id: int) -> int:
        """Return the token of the likeliest language of a window."""
        logits = self._forward(vectors, torch.tensor([[start_id]], device=vectors.device)).logits[0, -1]
        language: int = self.languages[int(logits[self.languages].argmax())]
        return language

    @torch.inference_mode()
    def decode(self, windows: Sequence[Window], start_id: int) -> list[WindowText]:
        """Return the texts of windows whose prompts have the same length."""
        texts: dict[int, _Text] = {}
        for step, fallback in enumerate(TEMPERATURES):
            open_ = [index for index in range(len(windows)) if index not in texts or self._fails(texts[index])]
            if step:  # A temperature that the client has chosen is the only one.
                open_ = [index for index in open_ if windows[index].temperature == 0.0]
            if not open_:
                break
            temperatures = [windows[index].temperature or fallback for index in open_]
            texts |= zip(open_, self._texts([windows[i] for i in open_], temperatures, start_id), strict=True)
        return [self._timed(window, texts[index], start_id) for index, window in enumerate(windows)]

    def _fails(self, text: _Text) -> bool:
        if is_silent(text.no_speech, text.average_logprob):
            return False
        return text.average_logprob < LEAST_LOGPROB or compression_ratio(self._text_of(text.ids)) > MOST_COMPRESSION

    def _text_of(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([token_id for token_id in ids if token_id < self._end_id])

    def _texts(self, windows: Sequence[Window], temperatures: Sequence[float], start_id: int) -> list[_Text]:
        device = self.model.device
        vectors = torch.cat([window.vectors for window in windows])
        ids = torch.tensor([window.prompt for window in windows], device=device)
        begin = ids.shape[1]
        edits = self._edits(begin)
        generators = [torch.Generator().manual_seed(window.seed) for window in windows]
        sums = [0.0] * len(windows)
        no_speech = [0.0] * len(windows)
        is_open = [True] * len(windows)
        cache = None
        new = ids
        # Half of the positions are for the text, as in openai's Whisper.
        for number in range(min(self._most_tokens // 2, self._most_tokens - begin)):
            output = self._forward(vectors, new, cache)
            cache = output[self._cache_name]
            logits = output.logits.float()
            if number == 0:
                place = windows[0].prompt.index(start_id)
                no_speech = logits[:, place].softmax(-1)[:, self._no_timestamps_id - 1].tolist()
            edited = edits(ids, logits[:, -1])
            logprobs = edited.log_softmax(-1)
            drawn = [
                int(row.argmax())
                if temperature == 0.0
                else int(torch.multinomial((row / temperature).softmax(-1).cpu(), 1, generator=generator))
                for row, temperature, generator in zip(edited, temperatures, generators, strict=True)
            ]
            for index, token_id in enumerate(drawn):
                if is_open[index]:
                    sums[index] += float(logprobs[index, token_id])
                    is_open[index] = token_id != self._end_id
                else:
                    drawn[index] = self._end_id
            new = torch.tensor(drawn, device=device)[:, None]
            ids = torch.cat([ids, new], 1)
            if not any(is_open):
                break
        texts = []
        for index, row in enumerate(ids[:, begin:].tolist()):
            text_ids = row[: row.index(self._end_id)] if self._end_id in row else row
            texts.append(_Text(text_ids, sums[index] / (len(text_ids) + 1), no_speech[index], temperatures[index]))
        return texts

    def _edits(self, begin: int) -> Any:
        """Return the rules for logits, in transformers' order."""
        device: Any = self.model.device  # Any, because the rules are typed as if it were a text
        edits: Any = LogitsProcessorList()
        if first := getattr(self._settings, "begin_suppress_tokens", None):
            edits.append(SuppressTokensAtBeginLogitsProcessor(first, begin_index=begin, device=device))
        if never := getattr(self._settings, "suppress_tokens", None):
            edits.append(SuppressTokensLogitsProcessor(never, device=device))
        edits.append(WhisperTimeStampLogitsProcessor(self._settings, begin_index=begin))
        return edits

    def _forward(self, vectors: Tensor, ids: Tensor, cache: Any = None) -> Any:
        encoded = BaseModelOutput(last_hidden_state=vectors)
        return self.model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=True, **{self._cache_name: cache})

    # -- the time of each token ----------------------------------------------------------------------------------------

    def _timed(self, window: Window, text: _Text, start_id: int) -> WindowText:
        at = window.prompt.index(start_id) + 1
        language_id = next((each for each in window.prompt[at : at + 1] if each in self.languages), -1)
        if is_silent(text.no_speech, text.average_logprob):
            tokens: list[SpokenToken] = []
        else:
            tokens = self._aligned(window, text.ids, start_id)
        return WindowText(
            language_id,
            text.temperature,
            text.average_logprob,
            text.no_speech,
            tokens,
        )

    def _aligned(self, window: Window, ids: Sequence[int], start_id: int) -> list[SpokenToken]:
        """Return the tokens with the times at which the decoder attends to the sound for each of them."""
        words = [token_id for token_id in ids if token_id < self._end_id]
        if not words:
            return [SpokenToken(token_id) for token_id in ids]
        before = [*window.prompt[window.prompt.index(start_id) :], self._no_timestamps_id]
        all_ids = torch.tensor([[*before, *words, self._end_id]], device=self.model.device)
        with self._queries() as queries:
            self._forward(window.vectors, all_ids)
        weights = torch.stack(
            [self._weights(window.vectors, queries[layer], layer, head) for layer, head in self._heads]
        )
        weights = weights[:, :, : max(1, window.num_rows)].softmax(-1)
        spread = weights.std(-2, keepdim=True, unbiased=False).clamp_min(1e-9)
        weights = (weights - weights.mean(-2, keepdim=True)) / spread
        # The query of a token attends to the sound of the next one, so the rows begin with the last token before.
        smooth = _median(weights).mean(0)[len(before) - 1 : -1]
        starts = path_starts(-smooth.double().cpu().numpy()) / TOKENS_PER_SECOND
        times = pairwise(starts)
        return [
            SpokenToken(token_id, *next(times), self._tokenizer.bytes_alone(token_id))
            if token_id < self._end_id
            else SpokenToken(token_id)
            for token_id in ids
        ]

    @contextmanager
    def _queries(self) -> Iterator[dict[int, Tensor]]:
        """Collect the queries of the layers whose attention follows the sound, while a forward runs."""
        found: dict[int, Tensor] = {}
        layers: Any = self.model.model.decoder.layers
        handles = [
            layers[layer].encoder_attn.q_proj.register_forward_hook(
                lambda _module, _inputs, output, layer=layer: found.__setitem__(layer, output)
            )
            for layer in {layer for layer, _ in self._heads}
        ]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def _weights(self, vectors: Tensor, queries: Tensor, layer: int, head: int) -> Tensor:
        """Return the logits [tokens, positions] of a head's attention to the sound."""
        attention: Any = self.model.model.decoder.layers[layer].encoder_attn
        rows = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
        keys = torch.nn.functional.linear(vectors[0], attention.k_proj.weight[rows])
        logits: Tensor = (queries[0, :, rows] @ keys.T).float() * attention.head_dim**-0.5
        return logits


def is_silent(no_speech: float, average_logprob: float) -> bool:
    return no_speech > SILENT_FROM and average_logprob < LEAST_LOGPROB


def compression_ratio(text: str) -> float:
    """Return how far zlib shrinks a text. One that repeats itself has a large ratio."""
    content = text.encode()
    return len(content) / len(zlib.compress(content))


def _median(weights: Tensor) -> Tensor:
    """Return the medians of a window of weights around each position, along the last axis."""
    around = _FILTER_WIDTH // 2
    if weights.shape[-1] <= around:
        return weights
    padded = torch.nn.functional.pad(weights, (around, around), mode="reflect")
    return padded.unfold(-1, _FILTER_WIDTH, 1).median(-1).values


def path_starts(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return where the cheapest path through costs [tokens, positions] enters the row of each token.

    The path goes from the first corner to the last one, by one token, one position, or both. All cells of a diagonal
    are computed at once.
    """
    num_rows, num_columns = costs.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf)
    total[0, 0] = 0.0
    came = np.zeros(total.shape, np.int8)  # 0: from both, 1: from the token before, 2: from the position before
    for diagonal in range(2, num_rows + num_columns + 1):
        rows = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        columns = diagonal - rows
        both = total[rows - 1, columns - 1]
        token = total[rows - 1, columns]
        position = total[rows, columns - 1]
        steps = np.where((both < token) & (both < position), 0, np.where((token < both) & (token < position), 1, 2))
        came[rows, columns] = steps
        total[rows, columns] = costs[rows - 1, columns - 1] + np.choose(steps, (both, token, position))
    starts = np.zeros(num_rows, np.int64)
    row = num_rows
    column = num_columns
    while row > 0:
        starts[row - 1] = max(column - 1, 0)
        step = came[row, column] if column > 0 else 1
        row -= step != 2
        column -= step != 1
    return starts
