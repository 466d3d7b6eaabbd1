"""Guesses in a replay, which come true where those of the recorded answer did."""

from __future__ import annotations

from oaiserve.engine.drafting.lookup import Lookup

WRONG = 0  # the id of a guess that does not come true; ids of a replay's answers are below 0


def answer_id(index: int) -> int:
    """Return the id of the token of an answer at this index, the same in all answers."""
    return -1 - index


class RecordedGuesses(Lookup):
    """The guesses at the tokens of one answer.

    Where the recorded answer had several tokens in a step, there is a guess, and it comes true up to the end of that
    run of tokens. Elsewhere there is none. The engine learns the rate of right guesses, as always.
    """

    __slots__ = ("_ends", "_prompt_len")

    def __init__(self, prompt_len: int, runs: list[int]) -> None:
        super().__init__()
        self._prompt_len = prompt_len
        self._ends: list[int] = []  # for each token of the answer: where the run of right guesses that it is in ends
        for index, length in enumerate(runs):
            begin = len(self._ends)
            self._ends += [begin + length if index % 2 else 0] * length

    def guess(self, token_ids: list[int], most: int) -> tuple[list[int], float]:
        place = len(token_ids) - self._prompt_len
        end = self._ends[place] if place < len(self._ends) else 0
        if end <= place:
            return [], 0.0
        right = [answer_id(index) for index in range(place, min(end, place + most))]
        return right + [WRONG] * (most - len(right)), self.acceptance[self.size]
