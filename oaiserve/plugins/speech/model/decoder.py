"""Decodes the text of encoded windows with transformers' Whisper, and finds when each token is spoken."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessorList, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.generation_whisper import _median_filter

from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.plugins.speech.tokens import NO_TIME, TOKENS_PER_SECOND, SpokenToken, WindowText
from oaiserve.plugins.speech.transcript import compression_ratio

# As in openai's Whisper: a text that fails a limit is decoded again at the next temperature.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MOST_COMPRESSION = 2.4
LEAST_LOGPROB = -1.0
SILENT_FROM = 0.6  # probability from which a window with an unlikely text has no speech
_MULTILINGUAL_SIZE = 51_865  # size of the smallest vocabulary with languages


@dataclass(frozen=True, slots=True)
class Window:
    """An encoded window, and what its text is to be."""

    vectors: Tensor  # [1, T, hidden size]
    prompt: list[int]  # the tokens before its text, which end with the task
    start: int  # index of <|startoftranscript|> in the prompt
    language_id: int  # the token of its language; -1: the model knows one language only
    temperature: float
    seed: int
    num_rows: int  # positions of the encoder that are sound, and not padding
    has_times: bool  # whether the times of tokens are needed


class _Text(NamedTuple):
    ids: list[int]
    average_logprob: float
    no_speech: float
    temperature: float

    @property
    def is_silent(self) -> bool:
        return self.no_speech > SILENT_FROM and self.average_logprob < LEAST_LOGPROB


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
        settings.return_timestamps = True
        settings.no_speech_threshold = None  # Its rule would compute each prompt once more.
        is_multilingual = getattr(settings, "is_multilingual", config.vocab_size >= _MULTILINGUAL_SIZE)
        languages = range(ids["<|startoftranscript|>"] + 1, ids["<|translate|>"]) if is_multilingual else ()
        self.languages: list[int] = [*languages]
        self._most_tokens: int = config.max_target_positions
        heads = getattr(settings, "alignment_heads", None)
        if heads is None:  # as openai's Whisper does without a list
            layers = range(config.decoder_layers // 2, config.decoder_layers)
            heads = [(layer, head) for layer in layers for head in range(config.decoder_attention_heads)]
        self._heads = [(int(layer), int(head)) for layer, head in heads]

    @torch.inference_mode()
    def language_of(self, vectors: Tensor, start_id: int) -> int:
        """Return the token of the likeliest language of a window."""
        logits = self._forward(vectors, [start_id]).logits[0, -1]
        language: int = self.languages[int(logits[self.languages].argmax())]
        return language

    @torch.inference_mode()
    def decode(self, window: Window) -> WindowText:
        """Return the text of a window. A temperature that the client has chosen is the only one."""
        for temperature in (window.temperature,) if window.temperature else TEMPERATURES:
            text = self._text(window, temperature)
            if text.is_silent or not self._fails(text):
                break
        tokens = [] if text.is_silent else self._spoken(window, text.ids)
        return WindowText(window.language_id, text.temperature, text.average_logprob, text.no_speech, tokens)

    def _fails(self, text: _Text) -> bool:
        words = self._tokenizer.decode([token_id for token_id in text.ids if token_id < self._end_id])
        return text.average_logprob < LEAST_LOGPROB or compression_ratio(words) > MOST_COMPRESSION

    def _text(self, window: Window, temperature: float) -> _Text:
        ids = window.prompt.copy()
        begin = len(ids)
        edits: Any = LogitsProcessorList(
            self.model._retrieve_logit_processors(deepcopy(self._settings), None, begin, 1, self.model.device)
        )
        generator = torch.Generator().manual_seed(window.seed)
        output = self._forward(window.vectors, ids)
        no_speech = float(output.logits[0, window.start].float().softmax(-1)[self._no_timestamps_id - 1])
        sum_of_logprobs = 0.0
        # Half of the positions are for the text, as in openai's Whisper.
        for _ in range(min(self._most_tokens // 2, self._most_tokens - begin)):
            (logits,) = edits(torch.tensor([ids], device=self.model.device), output.logits[:, -1].float())
            if temperature == 0.0:
                token_id = int(logits.argmax())
            else:
                token_id = int(torch.multinomial((logits / temperature).softmax(-1).cpu(), 1, generator=generator))
            sum_of_logprobs += float(logits.log_softmax(-1)[token_id])
            if token_id == self._end_id:
                break
            ids.append(token_id)
            output = self._forward(window.vectors, [token_id], output[self._cache_name])
        text_ids = ids[begin:]
        return _Text(text_ids, sum_of_logprobs / (len(text_ids) + 1), no_speech, temperature)

    def _forward(self, vectors: Tensor, ids: Sequence[int], cache: Any = None, **options: Any) -> Any:
        encoded = BaseModelOutput(last_hidden_state=vectors)
        new = torch.tensor([ids], device=self.model.device)
        options[self._cache_name] = cache
        return self.model(encoder_outputs=encoded, decoder_input_ids=new, use_cache=True, **options)

    # -- the time of each token ----------------------------------------------------------------------------------------

    def _spoken(self, window: Window, ids: Sequence[int]) -> list[SpokenToken]:
        """Return the tokens of a text with their bytes, and with their times if these are needed."""
        words = [token_id for token_id in ids if token_id < self._end_id]
        times = iter(self._times(window, words) if window.has_times and words else repeat((NO_TIME, NO_TIME)))
        return [
            SpokenToken(token_id, *next(times), self._tokenizer.bytes_alone(token_id))
            if token_id < self._end_id
            else SpokenToken(token_id)
            for token_id in ids
        ]

    def _times(self, window: Window, words: Sequence[int]) -> Iterable[tuple[float, float]]:
        """Return when the decoder attends to the sound for each token of text, in seconds from the window's start."""
        before = [*window.prompt[window.start :], self._no_timestamps_id]
        sound = window.vectors[:, : max(1, window.num_rows)]  # without the padding
        layers = self._attention(sound, [*before, *words, self._end_id])
        weights = torch.stack([layers[layer][0, head] for layer, head in self._heads]).float()
        spread = weights.std(-2, keepdim=True, unbiased=False).clamp_min(1e-9)
        weights = (weights - weights.mean(-2, keepdim=True)) / spread
        # The query of a token attends to the sound of the next one, so the rows begin with the last token before.
        smooth = _median_filter(weights, self.model.config.median_filter_width).mean(0)[len(before) - 1 : -1]
        return pairwise((path_starts(-smooth.double().cpu().numpy()) / TOKENS_PER_SECOND).tolist())

    def _attention(self, vectors: Tensor, ids: Sequence[int]) -> Sequence[Tensor]:
        """Return the weights [1, heads, tokens, positions] of each layer's attention to the sound."""
        config: Any = self.model.config
        usual = config._attn_implementation
        config._attn_implementation = "eager"  # Other implementations return no weights.
        try:
            layers: Sequence[Tensor] = self._forward(vectors, ids, output_attentions=True).cross_attentions
        finally:
            config._attn_implementation = usual
        return layers


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
