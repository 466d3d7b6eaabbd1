"""Computes steps of whole windows of sound, each of which becomes a text."""

from __future__ import annotations

from collections import OrderedDict

import torch

from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import ChunkResult, Masks, OutOfMemory, Step, StepResult
from oaiserve.plugins.speech.model.decoder import SpeechDecoder, Window

NO_NUMBERS = "The model produced no usable numbers (NaN or infinity) for this request."
_MOST_REQUESTS = 4096  # requests whose language is remembered


class SpeechRunner:
    """Runs steps on a decoder. Windows of a request are in the language of its first one, unless it names one."""

    is_exact = False
    is_asynchronous = False

    def __init__(self, decoder: SpeechDecoder) -> None:
        self._decoder = decoder
        self._languages: OrderedDict[str, int] = OrderedDict()  # keyed by request
        self._start_id: int = decoder.model.config.decoder_start_token_id

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        raise AssertionError("a model of speech has no KV cache")

    def launch(self, step: Step) -> StepResult:
        """Decode the windows of a step, one by one: the last bits of a product depend on its number of rows, so the
        text of one in a batch would depend on the others."""
        results = [ChunkResult(error=NO_NUMBERS)] * len(step.chunks)
        try:
            for index, chunk in sorted(enumerate(step.chunks), key=lambda each: each[1].sequence.index):
                if chunk.sequence.encoded[0].vectors.isfinite().all():
                    text = self._decoder.decode(self._window(chunk.sequence))
                    results[index] = ChunkResult(vector=text.as_floats())
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from None
        return StepResult(results)

    def _window(self, sequence: Sequence) -> Window:
        assert sequence.media is not None
        params = sequence.params
        num_rows = sequence.media.media[0].num_rows
        prompt = sequence.token_ids[: sequence.prompt_len - num_rows]
        start = prompt.index(self._start_id)
        language_id = -1
        if not self._decoder.languages:  # The model is for English alone, and has neither languages nor tasks.
            del prompt[start + 1 :]
        else:
            if prompt[start + 1] not in self._decoder.languages:
                prompt.insert(start + 1, self._language_of(sequence))
            language_id = prompt[start + 1]
        # A failed text is decoded again at a higher temperature. Its draws are the same each time, unless the client
        # sets a temperature without a seed.
        seed = 0 if params.temperature == 0.0 and params.seed is None else sequence.draw_key % 2**63
        vectors = sequence.encoded[0].vectors
        has_times = params.pooled_as == "token_times"
        return Window(vectors, prompt, start, language_id, params.temperature, seed, num_rows, has_times)

    def _language_of(self, sequence: Sequence) -> int:
        known = self._languages.get(sequence.request_id)
        if known is None:
            known = self._decoder.language_of(sequence.encoded[0].vectors, self._start_id)
            self._languages[sequence.request_id] = known
            if len(self._languages) > _MOST_REQUESTS:
                self._languages.popitem(last=False)
        return known

    def draw(self, launched: StepResult, masks: Masks | None) -> None:
        """Do nothing: a window is decoded as a whole."""

    def collect(self, launched: StepResult) -> StepResult:
        return launched
