"""The cost of a step: its expected duration by its load. Data and arithmetic only: no torch, no clock.

`step_cost_fit.py` learns the cost from steps while the server runs. The cost estimates the durations of steps that did
not run: of a request alone, of its neighbours, or of another load.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

# Numbers of rows between which the cost is interpolated linearly. While reading the weights dominates, further rows
# cost little; when computing dominates, each row costs as much as the ones before; CUDA graphs and tiles of native code
# cause steps in between.
KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)

# How far the cost may be extrapolated beyond the steps that it was learnt from. With few rows, a step takes the time of
# reading the weights, which all rows share; with many, the time grows with their number; and each token of context
# costs something.
FEWER = 4
MORE = 2
FURTHER = 4
LITTLE_CONTEXT = 4096  # number of attended tokens that hardly cost anything in a step


class Load(NamedTuple):
    """The load of a step, or one request's part of it."""

    decodes: int = 0  # tokens of sequences that decode, with their drafts
    decode_context: int = 0  # sum of the tokens that decodes attend to, without those in `cached_context`
    cached_context: int = 0  # the same for cached prefixes, which several sequences may share
    prompt_tokens: int = 0  # tokens of prompts, including those computed again
    prompt_context: int = 0  # sum of the tokens that prompt tokens attend to
    draws: int = 0  # rows for which logits of the vocabulary are computed
    edits: int = 0  # draws whose logits are edited on the host
    drafted: int = 0  # tokens of drafts among `decodes`

    @property
    def num_tokens(self) -> int:
        return self.decodes + self.prompt_tokens

    def without_prompts(self) -> Load:
        """Return the load without its prompts and their draws."""
        draws = min(self.draws, self.decodes)
        edits = min(self.edits, draws)
        return Load(self.decodes, self.decode_context, self.cached_context, 0, 0, draws, edits, self.drafted)


class Seen(NamedTuple):
    """The sizes of the steps that a cost was learnt from. Far beyond them, the cost is only a guess."""

    least_rows: int
    most_rows: int
    prompt_tokens: int = 0  # maximum in one step, like the next two
    prompt_context: int = 0
    decode_context: int = 0

    def covers(self, load: Load) -> bool:
        decodes, decode_context, _, prompt_tokens, prompt_context, _, _, _ = load
        rows = decodes + prompt_tokens
        if self.least_rows > FEWER * rows or rows > MORE * self.most_rows:
            return False
        if decode_context > LITTLE_CONTEXT and decode_context > FURTHER * self.decode_context:
            return False
        if not prompt_tokens:
            return True
        if not self.prompt_tokens:
            return False
        return prompt_context <= LITTLE_CONTEXT or prompt_context <= FURTHER * self.prompt_context


class Work(NamedTuple):
    """The sizes of a request that has ended."""

    num_prompts: int
    prompt_tokens: int  # tokens of all prompts
    cached_tokens: int  # tokens of all prompts that were cached
    num_choices: int
    completion_tokens: int  # tokens of all choices
    longest_choice_tokens: int
    needs_ids: bool  # the host edits the logits of all draws


def place(rows: int) -> tuple[int, float]:
    """Return the knot below a number of rows, and the position between it and the next one, 0 to 1. Beyond the last
    knot, the last line is extended."""
    index = min(max(bisect_right(KNOTS, rows) - 1, 0), len(KNOTS) - 2)
    return index, (rows - KNOTS[index]) / (KNOTS[index + 1] - KNOTS[index])


_MANY = 1025  # numbers of rows below this have a precomputed place
_PLACES = [place(max(1, rows)) for rows in range(_MANY)]


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of steps, in nanoseconds.

    All numbers are at least 0, and from two rows on `rows_ns` does not fall, so a larger step is never cheaper. Only
    one row may cost more than two.
    """

    rows_ns: tuple[float, ...]  # duration of a step with as many rows as each knot
    decode_context_ns: float = 0.0  # for each token that a decode attends to
    cached_context_ns: float = 0.0  # in a cached prefix, which the CPU's caches hold for several sequences
    prompt_context_ns: float = 0.0
    draw_ns: float = 0.0
    edit_ns: float = 0.0
    draft_ns: float = 0.0  # for each token of a draft
    prompts_ns: float = 0.0  # extra time of a step that has prompts, besides the cost of their rows
    seen: Seen | None = None  # None: the cost was not learnt, and holds for any step

    def covers(self, load: Load) -> bool:
        """Return whether the cost was learnt from similar steps, and isn't only a guess."""
        return self.seen is None or self.seen.covers(load)

    def times(self, factor: float) -> StepCost:
        """Return the cost where each step takes `factor` times as long."""
        numbers = {field.name: factor * getattr(self, field.name) for field in fields(self) if field.type == "float"}
        return replace(self, rows_ns=tuple(factor * ns for ns in self.rows_ns), **numbers)

    def expected_ns(self, load: Load) -> int:
        decodes, decode_context, cached_context, prompt_tokens, prompt_context, draws, edits, drafted = load
        rows = decodes + prompt_tokens
        if rows == 0:
            return 0
        index, way = _PLACES[rows] if rows < _MANY else place(rows)
        rows_ns = self.rows_ns
        ns = rows_ns[index] + self.draw_ns * draws + self.decode_context_ns * decode_context
        if way:
            ns += way * (rows_ns[index + 1] - rows_ns[index])
        if cached_context:
            ns += self.cached_context_ns * cached_context
        if prompt_tokens:
            ns += self.prompt_context_ns * prompt_context + self.prompts_ns
        if edits or drafted:
            ns += self.edit_ns * edits + self.draft_ns * drafted
        return int(ns)

    def together_ns(self, rows: int) -> float:
        """Return the time that a step's number of rows accounts for, without context, draws, edits and drafts."""
        index, way = _PLACES[rows] if rows < _MANY else place(rows)
        rows_ns = self.rows_ns
        return rows_ns[index] + way * (rows_ns[index + 1] - rows_ns[index])

    def share_ns(self, part: Load, load: Load) -> float:
        """Return the share of one part of a step's load in the step's time. The shares of all parts add up to the
        expected time.

        Each part is charged for what it adds. The time that rows share, such as that for reading the weights, is
        divided by rows, and the extra time of prompts by prompt tokens.
        """
        rows = load.decodes + load.prompt_tokens
        ns = self.together_ns(rows) * part.num_tokens / rows + self.draw_ns * part.draws + self.edit_ns * part.edits
        ns += self.decode_context_ns * part.decode_context + self.cached_context_ns * part.cached_context
        ns += self.draft_ns * part.drafted
        if part.prompt_tokens:
            ns += self.prompt_context_ns * part.prompt_context
            ns += self.prompts_ns * part.prompt_tokens / load.prompt_tokens
        return ns

    def alone_ns(self, work: Work, step_tokens: int) -> int | None:
        """Return the expected time of a whole request that runs alone, with a limit on the prompt tokens per step.
        Return None if the time of such steps isn't known yet.

        Its choices decode together, without drafts.
        """
        computed = work.prompt_tokens - work.cached_tokens
        rows = min(computed, step_tokens)
        if rows > 1 and not self.covers(Load(prompt_tokens=rows, prompt_context=rows * work.prompt_tokens // 2)):
            return None
        full, rest = divmod(computed, step_tokens)
        ns = full * (self.together_ns(step_tokens) + self.prompts_ns)
        if rest:
            ns += self.together_ns(rest) + (self.prompts_ns if rest > 1 else 0.0)
        prompt = work.prompt_tokens / work.num_prompts
        cached = work.cached_tokens / work.num_prompts
        ns += self.prompt_context_ns * work.num_prompts * (prompt * prompt - cached * cached) / 2
        ns += self.draw_ns * min(work.num_choices, work.completion_tokens)
        if (decodes := work.completion_tokens - work.num_choices) > 0:  # each choice has its first token already
            rows = max(1, round(decodes / max(1, work.longest_choice_tokens - 1)))
            if not self.covers(Load(rows, rows * round(prompt))):
                return None
            ns += self.together_ns(rows) * decodes / rows + (self.draw_ns + self.cached_context_ns * cached) * decodes
            ns += self.decode_context_ns * decodes * (prompt - cached + decodes / work.num_choices / 2)
        return int(ns + self.edit_ns * work.completion_tokens * work.needs_ids)


# Until a cost is learnt, steps are divided by rows alone.
BY_ROWS = StepCost(tuple(map(float, KNOTS)))
