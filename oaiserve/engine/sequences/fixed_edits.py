"""The edits of logits that a request specifies, and the token counts that its penalties need. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from functools import cached_property

import numpy as np

from oaiserve.engine.request import SamplingParams


class TokenCounts:
    """The distinct `ids` of a prompt and its answer, and how often each was generated (`times`), in arrays for
    NumPy."""

    def __init__(self, prompt: list[int]) -> None:
        # The indices of the prompt's ids, which copies of this object share, and the indices of other ids
        self._of_prompt = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        self._others: dict[int, int] = {}
        self.ids = array("q", self._of_prompt)
        self.times = array("q", bytes(8 * len(self.ids)))
        self.num_added = 0

    @property
    def num_of_prompt(self) -> int:
        """Return how many of the first ids belong to the prompt."""
        return len(self._of_prompt)

    def add(self, generated: list[int]) -> None:
        for token_id in generated:
            place = self._of_prompt.get(token_id)
            if place is None:
                place = self._others.setdefault(token_id, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token_id)
                self.times.append(0)
            self.times[place] += 1
        self.num_added += len(generated)

    def copy(self) -> TokenCounts:
        copied = TokenCounts([])
        copied._of_prompt = self._of_prompt
        copied._others = self._others.copy()
        copied.ids = self.ids[:]
        copied.times = self.times[:]
        copied.num_added = self.num_added
        return copied


class FixedEdits:
    """The edits of a request, shared by all its choices, as arrays that are made when a draw first needs them. A client
    may send an id for each token of the vocabulary, and converting these for each choice at each step would delay all
    others by seconds."""

    def __init__(self, params: SamplingParams, stop_ids: Collection[int]) -> None:
        self._params = params
        self._stop_ids = stop_ids
        self._counts: dict[int, TokenCounts] = {}  # one for each of its prompts, by index

    @cached_property
    def allowed_ids(self) -> np.ndarray | None:
        """The only ids that may be drawn; None: all."""
        allowed = self._params.allowed_token_ids
        return None if allowed is None else np.array(allowed, dtype=np.int64)

    @cached_property
    def biased_ids(self) -> np.ndarray:
        return np.array([*self._params.logit_bias], dtype=np.int64)

    @cached_property
    def biases(self) -> np.ndarray:
        """The biases in float32, one for each of `biased_ids`."""
        return np.array([*self._params.logit_bias.values()], dtype=np.float32)

    @cached_property
    def stop_ids(self) -> np.ndarray:
        """The ids that are forbidden before `min_tokens`."""
        return np.array([*self._stop_ids], dtype=np.int64)

    def counts_of_prompt(self, index: int, prompt: list[int]) -> TokenCounts:
        """Return the counts of a prompt for one of its choices, to which the choice adds its own tokens. The prompt is
        counted once, because counting thousands of tokens takes much longer than a copy."""
        if index not in self._counts:
            self._counts[index] = TokenCounts(prompt)
        return self._counts[index].copy()
