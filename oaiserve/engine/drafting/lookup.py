"""The look-up of a sequence's next tokens in its own text, behind an earlier occurrence of the last ones. No torch."""

from __future__ import annotations

from collections.abc import Sequence

# The tokens by which a place in the text is found, longest first: guesses behind a long match are better.
SIZES = (5, 2)
FIRST_GUESS = (0.8, 0.3)  # of the share of tokens that come true, before anything is known
WEIGHT = 0.1  # of the newest token in the moving average of that share
COMMON_WEIGHT = 0.05  # of the newest token in the share of all sequences, with which each of them begins


class Lookup:
    """The places in one sequence where a run of tokens came before, and how often a guess by these came true.

    Each token is indexed once. An entry is a hash: if two are the same, there is one more guess that is wrong.
    """

    __slots__ = ("_num_indexed", "_places", "acceptance", "size")

    def __init__(self, acceptance: Sequence[float] = FIRST_GUESS) -> None:
        self._places: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._num_indexed = 0
        self.size = 0  # of the last guess, as an index into SIZES
        self.acceptance = [*acceptance]  # by size

    def guess(self, token_ids: list[int], most: int) -> tuple[list[int], float]:
        """Return at most `most` guessed tokens, and the probability of the first of them."""
        self._index(token_ids)
        for index, size in enumerate(SIZES):
            place = self._places[index].get(hash(tuple(token_ids[-size:])))
            if place is None:
                continue
            self.size = index
            found = token_ids[place : place + most]
            period = len(token_ids) - place
            while len(found) < most:  # the text ends within the repetition, which then goes round
                found.append(found[-period])
            return found, self.acceptance[index]
        return [], 0.0

    def verified(self, num_guessed: int, num_accepted: int) -> None:
        """Note how many tokens of the last guess came true. Behind the first one that did not, nothing is known."""
        self.acceptance[self.size] = moved_share(self.acceptance[self.size], num_guessed, num_accepted)

    def _index(self, token_ids: list[int]) -> None:
        """Index new tokens: the place behind each run of tokens, where another token follows."""
        start, end = self._num_indexed, len(token_ids)
        for size, places in zip(SIZES, self._places, strict=True):
            for place in range(max(start, size), end):
                places[hash(tuple(token_ids[place - size : place]))] = place
        self._num_indexed = end


def moved_share(share: float, num_guessed: int, num_accepted: int, *, weight: float = WEIGHT) -> float:
    """Return the moving average of the share of right tokens, after one more guess."""
    for _ in range(num_accepted):
        share += weight * (1 - share)
    if num_accepted < num_guessed:
        share -= weight * share
    return share
