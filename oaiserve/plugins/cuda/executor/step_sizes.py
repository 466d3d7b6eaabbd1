"""The sizes of steps that are captured as graphs."""

from __future__ import annotations

from typing import NamedTuple

MOST_PROMPTS = 64  # limit of prompts in a replayed step; drafts count as prompts
MOST_TOKENS = 2048  # Larger steps keep the device busy for longer than the host takes to launch them.
_FEW_ROWS = 64


class Size(NamedTuple):
    """The size of a captured step."""

    rows: int  # limit of sequences with one token each
    tokens: int = 0  # all tokens of a step that also computes several tokens of other sequences; 0 if there are none

    @property
    def num_prompts(self) -> int:
        return MOST_PROMPTS if self.tokens else 0

    @property
    def num_sequences(self) -> int:
        """Return the most sequences, which is also the most draws."""
        return self.rows + self.num_prompts

    @property
    def num_tokens(self) -> int:
        return self.tokens or self.rows


def step_sizes(max_running: int, max_step_tokens: int, *, has_states: bool = False) -> list[Size]:
    """Return the sizes to capture, ascending: steps of only decodes, and others with few and with many decodes.

    A row of padding reads no keys, and with up to some hundred tokens, a matrix product takes as long as reading its
    weights. So a few tokens of padding cost hardly any time. With more tokens, each costs its arithmetic, so sizes are
    chosen for at most about 3 % of padding. Sizes with few decodes compute fewer rows of logits. Layers with states
    compute each prompt separately.
    """
    rows = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_running, 64)]
    sizes = [Size(number) for number in _up_to(max_running, rows)]
    if not has_states:
        most = min(MOST_TOKENS, max_step_tokens)
        tokens = [*range(16, 128, 16), *range(128, 1024, 32), *range(1024, MOST_TOKENS, 64)]
        sizes += [Size(min(max_running, number), number) for number in _up_to(most, tokens)]
        with_few = [*range(96, 512, 32), *range(512, 1024, 64), *range(1024, MOST_TOKENS, 128)]
        sizes += [Size(min(_FEW_ROWS, max_running, number), number) for number in _up_to(most, with_few)]
    return sorted(set(sizes), key=lambda size: (size.num_tokens, size))


def _up_to(most: int, numbers: list[int]) -> list[int]:
    return [number for number in numbers if number < most] + [most]
