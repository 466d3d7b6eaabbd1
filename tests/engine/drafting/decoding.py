"""Sequences that decode known texts with drafts, on a machine whose steps take a known time. Nothing is computed."""

import functools
import random
from collections.abc import Callable
from collections.abc import Sequence as Ordered

from oaiserve.engine.drafting.drafts import Drafts
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from tests.engine.memory import sequence

PROMPT = 30  # tokens of each text

Text = Callable[[int], int]  # the id at each place


def repeating(place: int) -> int:
    return place % 10


def misleading(place: int) -> int:
    """Return the ids of a text in which two tokens come again and again, and never the same one after them."""
    return place if place % 3 == 2 else place % 3


@functools.cache
def with_copies(seed: int, copied: float, length: int = 40_000) -> Text:
    """Return a text of spans, of which a share is copied from before with a few changes, and the rest is new."""
    rng = random.Random(seed)
    ids = [rng.randrange(5000) for _ in range(PROMPT)]
    while len(ids) < length:
        span = rng.randint(3, 40)
        start = rng.randrange(len(ids))
        if rng.random() < copied:
            ids += [rng.randrange(5000) if rng.random() < 0.05 else token_id for token_id in ids[start : start + span]]
        else:
            ids += [min(rng.randrange(5000), rng.randrange(5000), rng.randrange(5000)) // 20 for _ in range(span)]
    return ids.__getitem__


class Decoding:
    """Sequences that decode a text each."""

    def __init__(self, texts: Ordered[Text], drafts: Drafts | None = None) -> None:
        self.drafts = drafts or Drafts()
        self.texts = texts
        self.running = [self._begun(f"{number}", text) for number, text in enumerate(texts)]
        self.num_tokens = 0  # tokens of answers, so far

    def run(self, num_steps: int, ns_of: Ordered[float], noise: Callable[[], float] = lambda: 1.0) -> list[int]:
        """Take steps that last `ns_of` their number of tokens, times the noise. Return the tokens of each."""
        sizes = []
        for _ in range(num_steps):
            self.drafts.propose(self.running, others_wait=False)
            chunks = [Chunk(one, one.num_computed, 1 + len(one.draft), 1, tuple(one.draft)) for one in self.running]
            step = Step(chunks)
            sizes.append(step.num_tokens)
            self.drafts.verified(step, int(ns_of[step.num_tokens] * noise()))
            for chunk, text in zip(chunks, self.texts, strict=True):
                one = chunk.sequence
                known = len(chunk.sequence.token_ids)
                right = [text(known + index) for index in range(len(chunk.draft) + 1)]
                drawn = right[: chunk.num_accepted(right) + 1]
                one.token_ids += drawn
                one.num_tokens = known + len(drawn)
                one.num_computed = known + len(drawn) - 1
                self.num_tokens += len(drawn)
        return sizes

    def _begun(self, name: str, text: Text) -> Sequence:
        one = sequence(name, [text(place) for place in range(PROMPT)], max_tokens=10**6)
        one.token_ids.append(text(PROMPT))
        one.num_tokens = PROMPT + 1
        one.num_computed = PROMPT
        return one
