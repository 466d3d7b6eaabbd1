"""Looks up a sequence's next tokens in its own text, after an earlier occurrence of the last ones. No torch."""

from __future__ import annotations

from bisect import bisect_right

# How many of the last tokens must match to find an earlier position, longest first.
SIZES = (5, 2)
# The longer a match, the likelier the next token is right. Chances are kept for each of these lengths.
MATCHES = (2, 3, 5, 8, 16)
FIRST_CHANCES = (0.3, 0.4, 0.55, 0.7, 0.85)  # assumed chances that the next token is right, before anything is measured
WEIGHT = 0.05  # weight of the newest token in a sequence's own chances
COMMON_WEIGHT = 0.02  # weight of the newest token in the chances that new sequences start with
LEAST_CHANCE = 0.1  # A draft ends before the chance that all of it is right falls below this.
_KINDS = [bisect_right(MATCHES, match) - 1 for match in range(64)]  # index into MATCHES, by the length of a match


class Lookup:
    """The positions in one sequence where runs of tokens occurred before, and how often the tokens after them were
    right.

    Each token is indexed once. Entries are hashes: if two collide, one draft is wrong. Every draft is compared with the
    tokens that followed, whether or not a step has verified it.
    """

    __slots__ = ("_common", "_draft", "_match", "_num_indexed", "_num_seen", "_places", "chances")

    def __init__(self, common: list[float] | None = None) -> None:
        """Begin with the common chances of all sequences, and update these as well."""
        self._common = [*FIRST_CHANCES] if common is None else common
        self.chances = [*self._common]  # chances of this sequence, by the length of the match
        self._places: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._num_indexed = 0
        self._draft: list[int] = []  # the last draft
        self._match = 0  # length of the match that the last draft continues
        self._num_seen = 0  # length of the text when it was drafted

    def draft(self, token_ids: list[int], most: int) -> tuple[list[int], list[float]]:
        """Return at most `most` tokens, and for each the probability that it and all before it are right."""
        self._learn(token_ids)
        self._match, self._draft = self._find(token_ids, most)
        self._num_seen = len(token_ids)
        chance = 1.0
        chances = list[float]()
        for kind in _KINDS[self._match : self._match + len(self._draft)]:
            chance *= self.chances[kind]
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return self._draft[: len(chances)], chances

    def _learn(self, token_ids: list[int]) -> None:
        """Compare the last draft with the tokens that followed. Nothing can be learnt after the first that differs."""
        for index, (drafted, token_id) in enumerate(zip(self._draft, token_ids[self._num_seen :], strict=False)):
            kind = _KINDS[self._match + index]
            is_right = drafted == token_id
            self.chances[kind] += WEIGHT * (is_right - self.chances[kind])
            self._common[kind] += COMMON_WEIGHT * (is_right - self._common[kind])
            if not is_right:
                break

    def _find(self, token_ids: list[int], most: int) -> tuple[int, list[int]]:
        """Return the length of the match and `most` tokens after it, or none."""
        self._index(token_ids)
        end = len(token_ids)
        for places, size in zip(self._places, SIZES, strict=True):
            place = places.get(hash(tuple(token_ids[-size:])))
            if place is None:
                continue
            draft = token_ids[place : place + most]
            match = size
            while len(draft) < most:  # The text ends within the repetition, which then starts over.
                draft += draft[: most - len(draft)]
            while match < min(place, MATCHES[-1]) and token_ids[place - match - 1] == token_ids[end - match - 1]:
                match += 1
            return match, draft
        return 0, []

    def _index(self, token_ids: list[int]) -> None:
        """Note the position after each run of tokens that is followed by another token."""
        start = self._num_indexed
        end = len(token_ids)
        for size, places in zip(SIZES, self._places, strict=True):
            for place in range(max(start, size), end):
                places[hash(tuple(token_ids[place - size : place]))] = place
        self._num_indexed = end
