"""The sizes of steps that are captured as graphs."""

from __future__ import annotations

from typing import NamedTuple

MOST_PROMPTS = 64  # most prompts in a replayed step, and most draws after their tokens
# Longer prompts keep the device busy for longer than the host takes to launch their operations.
MOST_TOKENS = 1024
_MIXED_ROWS = 64
_MIXED_TOKENS = (64, 128, 192, 256, 384)


class Size(NamedTuple):
    """The size of a step that is captured."""

    rows: int  # sequences that compute one token each
    tokens: int  # all tokens of the other sequences

    @property
    def num_prompts(self) -> int:
        return MOST_PROMPTS if self.tokens else 0

    @property
    def num_sequences(self) -> int:
        """Return the most sequences, which is also the most draws."""
        return self.rows + self.num_prompts

    @property
    def num_tokens(self) -> int:
        return self.rows + self.tokens


def step_sizes(max_running: int, max_step_tokens: int, *, has_states: bool = False) -> list[Size]:
    """Return the sizes to capture, ascending: only decodes, only prompts, and a few with both.

    A row of padding reads no keys, and with up to some hundred rows, a matrix product takes as long as reading its
    weights. So a few rows of padding cost hardly any time. Layers with states compute each prompt by itself.
    """
    rows = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_running, 64)]
    rows = [number for number in rows if number < max_running] + [max_running]
    sizes = [Size(number, 0) for number in rows]
    if not has_states:
        most = min(MOST_TOKENS, max_step_tokens)
        tokens = [number for number in (16, 32, 64, 96, 128, 192, 256, 384, 512, 768) if number < most] + [most]
        few_tokens = [number for number in tokens if number in _MIXED_TOKENS] or tokens[:1]
        few_rows = sorted({min(_MIXED_ROWS, max_running), max_running})
        sizes += [Size(0, number) for number in tokens]
        sizes += [Size(number, of_prompts) for number in few_rows for of_prompts in few_tokens]
    return sorted(sizes, key=lambda size: (size.num_tokens, size.rows))
