"""`Lab` is an engine that has learnt what steps cost, with a clock and a machine that tests disturb."""

import random
from collections.abc import Callable

from oaiserve.engine.request import Event, Request, Terminal, TokenChunk
from oaiserve.engine.sequences.step import Step
from oaiserve.engine.sequences.step_load import chunk_load, load_of
from oaiserve.explain.step_cost import KNOTS, Load, StepCost
from tests.engine.accounts.pictures import picture
from tests.engine.doubles import (
    Clock,
    Inbox,
    ScriptedRunner,
    SimulatedEngine,
    make_engine,
    request,
    wait_until_idle,
)

MS = 1_000_000
TRUE = StepCost(
    rows_ns=tuple(8.0 * MS + 0.3 * MS * max(0, rows - 4) for rows in KNOTS),
    decode_context_ns=500.0,
    prompt_context_ns=100.0,
    draw_ns=50_000.0,
    prompts_ns=1.0 * MS,
)


class Machine:
    """A machine that takes the cores for `stolen_ns` in each step.

    Then the two threads of a step run by turns. They don't wait for each other's memory, and use a seventh less of the
    cores than in a step that is not held up.
    """

    num_threads = 1
    parallelism = 2.0

    def __init__(self) -> None:
        self.stolen_ns = 0
        self.unused_ns = 0  # time of each core, so far

    def step_ended(self, step_ns: int) -> None:
        """Note the end of a step that would have taken `step_ns`."""
        if self.stolen_ns:
            self.unused_ns += self.stolen_ns + step_ns // 7

    def delay_ns(self) -> int:
        return self.stolen_ns

    def more_ns(self, most_ns: int) -> int:
        return 0


class Lab:
    """An engine that has learnt what steps cost, and a clock, a machine and consumers that tests disturb."""

    def __init__(self, **options: object) -> None:
        self.clock = Clock()
        self.machine = Machine()
        self.runner = ScriptedRunner(computing=self._compute)
        self.log: list[tuple[Load, dict[str, Load]]] = []  # the load of each step, and that of each of its requests
        # The process stands still for so long in the next step, or in the next hand-over.
        self.still_in_step_ns = 0
        self.still_between_ns = 0
        self.in_step = list[Callable[[], None]]()  # what happens when the next step begins
        defaults = {"kv_blocks": 4096, "max_model_len": 4096, "max_running": 16, "max_step_tokens": 256}
        engine_options = {"tokenize_workers": 0, "prefix_cache": False, **defaults, **options}
        self.engine: SimulatedEngine = make_engine(
            self.runner,
            clock_ns=self.clock,
            machine=self.machine,
            cores_ns=lambda: 2 * (self.clock.now_ns - self.machine.unused_ns),
            **engine_options,
        )

    def _compute(self, step: Step) -> None:
        """Take the true time of the clock, and the time that the machine steals."""
        while self.in_step:
            self.in_step.pop()()
        load = load_of(step)
        parts = dict[str, Load]()
        for chunk in step.chunks:
            own = parts.get(chunk.sequence.request_id, Load())
            parts[chunk.sequence.request_id] = Load(*map(sum, zip(own, chunk_load(chunk), strict=True)))
        self.log.append((load, parts))
        step_ns = TRUE.expected_ns(load)
        self.clock.now_ns += step_ns + self.machine.stolen_ns
        self.machine.step_ended(step_ns)
        self._stand_still(self.still_in_step_ns)
        self.still_in_step_ns = 0

    def _stand_still(self, ns: int) -> None:
        self.clock.now_ns += ns
        self.machine.unused_ns += ns

    def learn(self, longest: int = 700, number: int = 60) -> None:
        rng = random.Random(1)
        lengths = [(min(longest, rng.choice([1, 2, 30, 200, 700])), rng.randint(1, 30)) for _ in range(number)]
        for times in range(4):
            self.run(request(f"alone {times}", prompt_len=30, max_tokens=40))
        self.run(*(request(f"warm {i}", prompt_len=n, max_tokens=m) for i, (n, m) in enumerate(lengths)))
        for few in (4, 2, 1):
            self.run(*(request(f"few {few} {i}", prompt_len=30, max_tokens=80) for i in range(few)))

    def run(self, *requests: Request, after: int = 0, deliver_ns: int = 0) -> dict[str, Terminal]:
        """Run requests: the first one, and the others during its first step, or when it has `after` tokens.

        A hand-over takes `deliver_ns`.
        """
        self.log.clear()
        first, *others = requests
        inbox = Inbox()
        inbox.live_in(self.engine.world)
        left = {"tokens": after}

        def deliver(events: list[Event]) -> None:
            self.clock.now_ns += deliver_ns
            self._stand_still(self.still_between_ns)
            self.still_between_ns = 0
            left["tokens"] -= sum(isinstance(event, TokenChunk) for event in events)
            if after and others and left["tokens"] <= 0:
                for other in others:
                    self.engine.submit(other, inbox)
                others.clear()
            inbox(events)

        names = [each.request_id for each in requests]
        self.engine.submit(first, deliver)
        if not after:
            for other in others:
                self.engine.submit(other, inbox)
            others.clear()
        ended = inbox.wait_terminal(*names)
        wait_until_idle(self.engine)
        return ended


def mixed(rng: random.Random) -> list[Request]:
    """Return requests with prompts in chunks and several choices, and sometimes some with pictures."""
    some = [
        request(f"{i}", prompt_len=rng.randint(1, 60), max_tokens=rng.randint(1, 20), n=rng.choice([1, 1, 3]))
        for i in range(8)
    ]
    pictures = [picture(f"picture {i}", rng.randint(1, 9), max_tokens=5) for i in range(rng.choice([0, 3]))]
    return some + pictures
