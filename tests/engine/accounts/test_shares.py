"""The shares of requests in the server's meters: they and nobody's add up to them, in integers."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.accounts.shares import Shares
from oaiserve.engine.engine import Engine
from oaiserve.engine.sequences.step import Step
from oaiserve.engine.sequences.step_load import chunk_load, load_of, sum_of
from oaiserve.explain.causes import RequestCauses
from oaiserve.explain.step_cost import BY_ROWS, KNOTS, Load, StepCost
from oaiserve.explain.step_cost_fit import StepCostFit
from tests.engine.accounts.pictures import media_of, picture
from tests.engine.doubles import Clock, Inbox, Leaver, ScriptedRunner, make_engine, request, wait_until_idle

COST = StepCost(tuple(8e6 + 3e5 * rows for rows in KNOTS), 500.0, 300.0, 100.0, 5e4, 1e5, 2e4, 1e6)
LOADS = st.builds(
    Load, st.integers(0, 9), *(st.integers(0, 9000) for _ in range(2)), st.integers(0, 900), *(st.integers(0, 9),) * 4
).filter(lambda load: load.prompt_tokens > 0 or (load.decodes > 0 and not load.prompt_context))


@given(st.lists(LOADS, min_size=1, max_size=9), st.sampled_from([COST, BY_ROWS]))
def test_the_shares_of_the_parts_of_a_step_add_up_to_its_expected_time(parts: list[Load], cost: StepCost) -> None:
    load = sum_of(parts)
    whole = sum(cost.share_ns(part, load) for part in parts)
    assert whole == pytest.approx(cost.share_ns(load, load)) == pytest.approx(cost.expected_ns(load), abs=1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.booleans()), max_size=9))
def test_shares_of_requests_that_leave_during_steps_are_never_below_zero(steps: list[tuple[int, int, bool]]) -> None:
    shares = Shares(0, StepCostFit())
    for of_step, number, is_last in steps:
        leaving = [RequestCauses(has_several=False) for _ in range(number)]
        for own in leaving:
            assert min(shares.close(own, is_last=False)) >= 0
        shares.cores.step_ended(0, of_step)
        shares.time.step_ended(0, of_step)
        for own in leaving:  # The step had computed for them.
            own.core_ns += of_step / number
            own.machine_ns += of_step / number
        shares.step_ended()
        assert min(shares.close(RequestCauses(has_several=False), is_last=is_last)) >= 0
        for meter in (shares.cores, shares.time):
            assert 0 <= meter.nobody + meter.given <= meter.total


class Meters:
    """A clock and the time of cores, which steps and images move by odd amounts, and the shares by the plain rule."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.cores = 777
        self.engine: Engine | None = None
        self.machine_ns: dict[str, float] = {}  # time of each request
        self.of_nobody: list[str] = []  # requests that had ended when a step computed for them

    def read(self) -> int:
        self.cores += self.random.randint(0, 1000)
        return self.cores

    def compute(self, step: Step) -> None:
        ns = COST.expected_ns(load_of(step))
        self.clock.now_ns += ns
        self.cores += 2 * ns - self.random.randint(0, ns)
        learnt = self.engine.step_cost
        load = load_of(step)
        cost = learnt if learnt is not None and learnt.expected_ns(load) else BY_ROWS  # the first fits may be 0
        for chunk in step.chunks:
            name = chunk.sequence.request_id
            if name in self.engine.open_requests(0):
                share = cost.share_ns(chunk_load(chunk), load) / cost.share_ns(load, load)
                self.machine_ns[name] = self.machine_ns.get(name, 0.0) + ns * share
            else:
                self.of_nobody.append(name)

    def encode(self, name: str) -> None:
        """Encode a part of a request's image."""
        ns = self.random.randint(0, 10**7)
        self.clock.now_ns += ns
        self.cores += self.random.randint(0, ns)
        self.machine_ns[name] = self.machine_ns.get(name, 0.0) + ns


@pytest.mark.usefixtures("overlap")
@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"prompt_len": st.integers(1, 30), "max_tokens": st.integers(1, 12), "n": st.integers(1, 3)}
        ),
        min_size=1,
        max_size=7,
    ),
    st.integers(0, 10**6),
    st.lists(st.integers(0, 9), max_size=3),
    st.booleans(),
)
def test_shares_with_own_media_and_what_is_nobodys_add_up_to_the_meters_exactly(
    asked: list[dict[str, Any]], seed: int, pieces: list[int], is_shared: bool
) -> None:
    meters = Meters(seed)
    runner = ScriptedRunner(computing=meters.compute)
    with make_engine(
        runner,
        clock_ns=meters.clock,
        cores_ns=meters.read,
        kv_blocks=24,
        block_bytes=10**9,
        weight_bytes=10**6,
        max_model_len=60,
        prefix_cache=is_shared,
        media=media_of(meters.encode),
    ) as engine:
        began_ns = meters.clock.now_ns
        meters.engine = engine
        inbox = Leaver(engine, {"1": 2, "4": 1})
        for index, params in enumerate(asked):
            engine.submit(request(str(index), **params), inbox)
        pictures = [picture(f"picture {index}", number, max_tokens=3) for index, number in enumerate(pieces)]
        for each in pictures:
            engine.submit(each, inbox)
        ended = inbox.wait_terminal(*map(str, range(len(asked))), *(each.request_id for each in pictures))
        wait_until_idle(engine)
        meters.clock.move(3)
        engine.submit(request("later"), inbox)
        ended |= inbox.wait_terminal("later")
        wait_until_idle(engine)
    accounts = [each.account for each in ended.values()]
    for name, each in ended.items():
        assert each.account.machine_ns == pytest.approx(meters.machine_ns.get(name, 0), abs=2)
    numbers = engine.snapshot()
    own_ns = meters.clock.now_ns - began_ns
    for name, nobody, total in (
        ("core_ns", numbers.nobody_core_ns, numbers.core_ns),
        ("machine_ns", numbers.nobody_machine_ns, own_ns),
    ):
        parts = [getattr(account, name) for account in accounts]
        assert all(type(part) is int and part >= 0 for part in parts)
        assert sum(parts) + nobody == total
    assert sum(account.kv_byte_seconds for account in accounts) == pytest.approx(numbers.kv_byte_ns / 1e9)
    read = sum(account.weight_bytes for account in accounts)
    assert read <= numbers.num_steps * 10**6 + len(accounts)
    if not set(meters.of_nobody):
        assert read == pytest.approx(numbers.num_steps * 10**6, abs=len(accounts))
    assert numbers.nobody_machine_ns >= 3_000_000_000
    assert numbers.nobody_core_ns >= 777


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_a_request_is_charged_for_its_blocks_until_its_last_step_has_ended(max_tokens: int) -> None:
    clock = Clock()
    with make_engine(ScriptedRunner(computing=lambda _: clock.move(2)), clock_ns=clock, block_bytes=10) as engine:
        inbox = Inbox()
        engine.submit(request("a", prompt_len=13, max_tokens=max_tokens), inbox)
        account = inbox.wait_terminal("a")["a"].account
        wait_until_idle(engine)
    assert account.kv_byte_seconds == 4 * 10 * 2 * max_tokens  # four blocks of four tokens, for each step's two seconds
    assert engine.snapshot().kv_byte_ns == account.kv_byte_seconds * 1e9
