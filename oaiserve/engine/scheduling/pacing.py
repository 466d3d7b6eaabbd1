"""The time of a step: how many prompt tokens fit into it, so that steps and the ITL of streams meet their targets.

Stdlib only; owned by the engine thread.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from copy import copy
from math import inf

from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.sequences.step_load import chunk_load, load_of, sum_of
from oaiserve.explain.step_cost import KNOTS, Load, StepCost

LEAST_SECONDS = 0.05  # shortest step target; nobody notices a shorter step
EFFICIENT = 3  # minimum time of an efficient step, as a multiple of the time of one row
# If a short prompt begins and ends in a step, much longer ones may extend the step to BESIDE_SHORT times its time. For
# a while after a short one has arrived, steps are as short as possible while they still reach SHORTER_PACE of the
# tokens per second. Shorter steps read the weights more often. That may take SPARE_SHARE of the time of all steps with
# prompts, so prompts lose less than a tenth of their tokens per second.
BESIDE_SHORT = 1.25
SHORTER_PACE = 0.95
SPARE_SHARE = 0.08
UNIT = 16  # Chunks of prompts are multiples of this many tokens, and have at least as many.
# A step may always have this many prompt tokens. While the cost is unknown, it may have no more; after that, at most
# twice as many as any earlier step. On a Zen 4, 64 prompts of 128 tokens that arrive at once wait 1.6 times as long for
# their first tokens if this is 64, because decodes fill such steps. With 128, throughput and these times are the same
# as with steps of 512.
FIRST = 128
# While other clients decode, the rows of a client with more than its share may extend a step to BESIDE_OTHERS times the
# time that it would take with the other clients alone, or to BESIDE_NS in any case, which nobody notices.
BESIDE_OTHERS = 2
BESIDE_NS = 10e6
# While other clients decode, the grammar masks of one client may take this share of their steps' time on average, at
# most MASKS_NS per step. They may always take LEAST_MASKS_NS, which nobody notices. If a mask takes longer, the next
# masks of this client wait until that time is made up for.
MASKS_SHARE = 0.25
MASKS_NS = 5e6
LEAST_MASKS_NS = 1e6
# Background work may extend a step of the foreground to BESIDE_FOREGROUND times its time: 1.05 is promised, and the
# cost is not known exactly. The cost has flat parts by chance, so a row counts at least as much as the mean of SMOOTH
# more rows.
BESIDE_FOREGROUND = 1.02
SMOOTH = 16


class StepTime:
    """The expected time of the step being scheduled, by the learnt cost of steps, and how much fits into it.

    The target is the time of the smallest efficient step, but at least LEAST_SECONDS. If decodes alone take long,
    prompts get as much time in addition, unless there is a target for ITL: then a step with decodes meets that target,
    with at least UNIT prompt tokens. The same holds for the paces at which decodes meet their deadlines.
    """

    def __init__(
        self,
        cost: Callable[[], StepCost | None],
        most_tokens: int,
        itl_target_seconds: float | None = None,
    ) -> None:
        self._cost_now = cost
        if itl_target_seconds is None:
            self._itl_ns = None
        else:
            self._itl_ns = itl_target_seconds * 1e9
        self._most_tokens = most_tokens
        self._cost: StepCost | None = None
        self._largest = FIRST // 2  # most prompt tokens in a step so far, with a known cost
        self.target_ns = 0.0
        self._efficient = UNIT  # rows of a step that it may always have
        self._token_ns = 0.0  # time per token of a prompt that has full steps to itself
        self._short_ns = inf  # limit of a step with short prompts, for much longer prompts in it
        self._is_shorter = False  # whether prompts get less of the step because of short ones
        self._spare_ns = inf  # time that shorter steps may still cost; at most the target
        self._step = Step()
        self._load: Load | None = None  # load of the step; computed on demand
        self._others: Load | None = None  # the foreground's load in the step that background work is added to
        self._is_paced = False
        self._most_ns = 0.0
        self._alone_ns = self._row_ns = 0.0  # the time of `_others`, and that of each additional row

    def without_itl_target(self) -> StepTime:
        """Return a copy for other steps, without a target for ITL."""
        other = copy(self)
        other._itl_ns = None
        return other

    @property
    def is_known(self) -> bool:
        return self._cost_now() is not None

    def begin(self, step: Step, others: Step | None = None) -> None:
        """Start filling a step that already contains its decodes. With `others`, the foreground's part of the step, it
        is a step of background work: it contains no decodes yet, and `others` limit these, too, once the cost is
        known."""
        self._pay()
        self._short_ns = inf
        self._is_shorter = False
        self._step = step
        self._load = None
        self._others = None
        cost = self._cost_now()
        if cost is not self._cost and cost is not None:
            self._cost = cost
            self._efficient, self.target_ns = self.target(cost)
            most_tokens = self.lone_tokens
            self._token_ns = cost.expected_ns(Load(prompt_tokens=most_tokens)) / most_tokens
        if others is not None and cost is not None:
            self._others = load = load_of(others)
            self._alone_ns = cost.expected_ns(load)
            self._row_ns = (cost.expected_ns(load._replace(decodes=load.decodes + SMOOTH)) - self._alone_ns) / SMOOTH
            self._most_ns = BESIDE_FOREGROUND * self._alone_ns

    def _pay(self) -> None:
        """Charge the time that the last step has lost by being shorter, and credit the time that the next ones may
        lose."""
        cost = self._cost
        load = self._load
        if cost is None or load is None or not load.prompt_tokens:
            return
        spare_ns = self._spare_ns + SPARE_SHARE * cost.expected_ns(load)
        if self._is_shorter:
            prompts_ns = cost.expected_ns(load._replace(prompt_context=0)) - cost.expected_ns(load.without_prompts())
            spare_ns -= max(0.0, prompts_ns - load.prompt_tokens * self._token_ns)
        self._spare_ns = min(spare_ns, self.target_ns)

    def target(self, cost: StepCost) -> tuple[int, float]:
        """Return the number of rows that a step may always have, and its target."""
        rows, ns = efficient(cost, self._most_tokens)
        return rows, max(LEAST_SECONDS * 1e9, ns)

    def has_room(self, num_tokens: int, start: int = 0, *, is_beside_short: bool = False) -> bool:
        """Return whether a prompt with `num_tokens` left may begin, or continue from `start`, in the step, after the
        prompts in it."""
        load = self.load
        if not load.prompt_tokens and self._others is None:
            return True
        ns = self._with(load, start, min(num_tokens, UNIT))[1]
        if is_beside_short and ns > self._short_ns:
            self._is_shorter = True
            return False
        return ns <= self._most_ns

    def begin_short(self) -> None:
        """Limit how much longer prompts may add to the step, after a short one that begins and ends in it."""
        if self._cost is not None and self._spare_ns > 0:
            self._short_ns = BESIDE_SHORT * self._expected_ns(self.load)

    def shorten(self, start: int, most: int) -> None:
        """Make the step shorter than others, if it has no prompt yet. Its first one has up to `most` tokens, from
        `start` on."""
        load = self.load
        number = self.fitting(start, most) // UNIT
        if self._cost is None or load.prompt_tokens or not number or self._spare_ns <= 0:
            return

        def pace(number: int) -> float:
            return (load.num_tokens + number * UNIT) / self._with(load, start, number * UNIT)[1]

        number = 1 + bisect_left(range(1, number + 1), SHORTER_PACE * pace(number), key=pace)
        self._most_ns = self._with(load, start, number * UNIT)[1]
        self._is_shorter = True

    def decodes_beside(self, decodes: Iterable[Sequence]) -> int:
        """Return how many of these background decodes, in their order, fit into the foreground's step."""
        load = self._others
        number = 0
        assert load is not None
        for one in decodes:
            load = sum_of((load, chunk_load(Chunk(one, one.num_computed, 1))))
            if self._expected_ns(load) > self._most_ns:
                break
            number += 1
        return number

    @property
    def decodes_are_long(self) -> bool:
        """Return whether the step's decodes alone exceed its target."""
        cost = self._cost
        load = self.load
        return cost is not None and cost.expected_ns(load.without_prompts()) > self.target_ns

    @property
    def lone_tokens(self) -> int:
        """The maximum number of tokens of a prompt in a step without anything else."""
        cost = self._cost
        if cost is None:
            return FIRST
        rows = range(1, self._most_tokens + 1)
        fitting = bisect_right(rows, self.target_ns, key=lambda number: cost.expected_ns(Load(prompt_tokens=number)))
        return max(fitting, min(self._efficient, self._most_tokens))

    def rows_beside(self, num_rows: int) -> int:
        """Return how many rows a step may have in all. `num_rows` is the number of decodes of clients within their
        share."""
        cost = self._cost
        if cost is None:
            return self._most_tokens

        def expected_ns(rows: int) -> int:
            return cost.expected_ns(Load(decodes=rows, draws=rows))

        most_ns = max(BESIDE_OTHERS * expected_ns(max(1, num_rows)), BESIDE_NS)
        return bisect_right(range(1, self._most_tokens + 1), most_ns, key=expected_ns)

    def masks_beside(self, num_rows: int) -> float:
        """Return how many nanoseconds of CPU time a client's masks may take per step with this many decodes of others.
        For background work next to the foreground, return how many its masks may take."""
        if self._others is not None:
            return (BESIDE_FOREGROUND - 1) * self._alone_ns
        if self._cost is None:
            return MASKS_NS
        rows = max(1, num_rows)
        step_ns = self._cost.expected_ns(Load(decodes=rows, draws=rows))
        return max(LEAST_MASKS_NS, min(MASKS_NS, MASKS_SHARE * step_ns))

    def fitting(self, start: int, most: int, *, is_beside_short: bool = False) -> int:
        """Return how many of `most` tokens of a prompt from `start` on fit into the step.

        The number that makes the step efficient always fits, however much context the tokens attend to, unless the step
        is to be shorter, or the prompt `is_beside_short` ones.
        """
        load = self.load
        cost = self._cost
        most = min(most, max(UNIT, 2 * self._largest - load.prompt_tokens))
        bound_ns = min(self._most_ns, self._short_ns) if is_beside_short else self._most_ns
        if cost is None or self._with(load, start, most)[1] <= bound_ns:
            return most

        def expected_ns(number: int) -> float:
            return self._with(load, start, number * UNIT)[1]

        number = bisect_right(range(1, most // UNIT + 1), bound_ns, key=expected_ns)
        if self._others is not None:
            return UNIT * number
        if bound_ns < self._most_ns:
            self._is_shorter = True
        if self._is_shorter or self._is_paced:
            return min(most, max(UNIT * number, UNIT))
        return min(most, max(UNIT * number, UNIT, self._efficient - load.num_tokens))

    def add(self, start: int, num_tokens: int) -> None:
        """Count a chunk of a prompt that was added to the step."""
        self._load = load = self._with(self.load, start, num_tokens)[0]
        if self._cost is not None:
            self._largest = max(self._largest, load.prompt_tokens)

    @property
    def load(self) -> Load:
        """Return the load of the step so far."""
        if self._load is None:
            self._load = load = load_of(self._step)
            if self._others is not None:
                self._load = sum_of((load, self._others))
            else:
                self._bound(load)
        return self._load

    def _bound(self, decodes: Load) -> None:
        if self._cost is None:
            decodes_ns = 0.0
        else:
            decodes_ns = self._cost.expected_ns(decodes)
        self._most_ns = decodes_ns + self.target_ns
        self._is_paced = False
        if self._itl_ns is not None and decodes.decodes:
            self._most_ns = self._itl_ns
            self._is_paced = True

    def _with(self, load: Load, start: int, num_tokens: int) -> tuple[Load, float]:
        """Return the load with a further chunk of a prompt, and its expected time."""
        context = load.prompt_context + num_tokens * (2 * start + num_tokens - 1) // 2
        load = load._replace(
            prompt_tokens=load.prompt_tokens + num_tokens, prompt_context=context, draws=load.draws + 1
        )
        return load, self._expected_ns(load)

    def _expected_ns(self, load: Load) -> float:
        ns = 0.0 if self._cost is None else self._cost.expected_ns(load)
        if self._others is None:
            return ns
        return max(ns, self._alone_ns + self._row_ns * (load.num_tokens - self._others.num_tokens))


def efficient(cost: StepCost, most_tokens: int) -> tuple[int, float]:
    """Return the rows and the time of the smallest efficient step of prompts, with at least FIRST rows.

    It takes several times as long as one row, which has to read all weights, so it spends most of its time on
    computing.
    """
    for rows, ns in zip(KNOTS, cost.rows_ns, strict=True):
        if rows >= FIRST and (ns >= EFFICIENT * cost.rows_ns[0] or rows >= most_tokens):
            break
    return rows, ns + cost.prompts_ns
