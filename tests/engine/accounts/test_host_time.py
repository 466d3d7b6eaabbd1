"""The time of the engine thread in contiguous parts."""

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.accounts.host_time import HostTime, describe
from oaiserve.engine.sequences.step import Chunk, Step, StepResult
from oaiserve.facts.step_record import HostPart
from tests.engine.doubles import (
    Clock,
    Inbox,
    Launched,
    ScriptedRunner,
    make_engine,
    request,
    wait_until_idle,
)
from tests.engine.memory import sequence


@given(st.lists(st.tuples(st.integers(0, 10**9), st.sampled_from(HostPart))))
def test_parts_add_up_to_all_of_the_time(moves: list[tuple[int, HostPart]]) -> None:
    clock = Clock()
    began_ns = clock.now_ns
    host = HostTime(clock)
    expected = dict.fromkeys(HostPart, 0)
    part = HostPart.IDLE
    for ns, entered in moves:
        clock.now_ns += ns
        expected[part] += ns
        assert host.enter(entered) == host.since_ns == clock.now_ns
        part = entered
    assert host.spent_ns == expected
    assert sum(host.spent_ns.values()) == clock.now_ns - began_ns


def test_a_step_is_described_by_its_kind_and_its_sizes() -> None:
    decode = Chunk(sequence("a", 4), 4, 1)
    verified = Chunk(sequence("a", 4), 4, 3, 3, (1, 2))
    prefill = Chunk(sequence("b", 9), 0, 9)
    assert describe(Step([decode])) == "decode, 1 sequence, 1 token"
    assert describe(Step([verified])) == "decode, 1 sequence, 3 tokens"
    assert describe(Step([prefill])) == "prefill, 1 sequence, 9 tokens"
    assert describe(Step([decode, prefill])) == "mixed, 2 sequences, 10 tokens"
    assert describe(Step([verified, prefill])) == "mixed, 2 sequences, 12 tokens"


# -- in the engine ----------------------------------------------------------------------------------------------------


def test_a_step_passes_through_all_parts_in_order(overlap: bool, parts_entered: list[str]) -> None:
    with make_engine(tokenize_workers=0) as engine:
        engine.world.settle()
        list(engine.stream(request(prompt_len=4, max_tokens=2)))
    shown = parts_entered
    names = [name for name in shown if name not in ("idle", "commands", "hand_over", "schedule")]
    prefill = "prefill, 1 sequence, 4 tokens"
    decode = "decode, 1 sequence, 1 token"
    of_prefill = [f"wait {prefill}", f"process {prefill}"]
    launch_decode = [f"launch {decode}"]
    between = [*launch_decode, *of_prefill] if overlap else [*of_prefill, *launch_decode]
    assert names == [f"launch {prefill}", *between, f"wait {decode}", f"process {decode}"]
    assert shown[:2] == ["commands", "idle"]
    assert shown.count("hand_over") >= 2
    assert shown[shown.index(f"launch {prefill}") - 1] == "schedule"


class Slow(ScriptedRunner):
    """A runner that takes 3 ms of the clock to launch a step and 5 ms to collect it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(launching=lambda _: clock.move(0.003))
        self._clock = clock

    def collect(self, launched: Launched) -> StepResult:
        self._clock.move(0.005)
        return super().collect(launched)


def test_the_parts_of_all_steps_add_up_to_the_time_of_the_engine_thread(overlap: bool) -> None:
    clock = Clock()
    inbox = Inbox(lambda _: clock.move(0.002))
    began_ns = clock.now_ns
    with make_engine(Slow(clock), clock_ns=clock, tokenize_workers=0) as engine:
        wait_until_idle(engine)
        clock.move(1)
        engine.submit(request("r", max_tokens=4), inbox)
        inbox.wait_terminal("r")
        wait_until_idle(engine)
        snapshot = engine.snapshot()
        steps = engine.take_steps()
    parts_ms = {part: [step.host_ns[part] // 1_000_000 for step in steps] for part in HostPart}
    assert parts_ms == {
        HostPart.IDLE: [1000, 0, 0, 0],
        HostPart.COMMANDS: [0] * 4,
        HostPart.ENCODE: [0] * 4,
        HostPart.SCHEDULE: [0] * 4,
        HostPart.LAUNCH: [6, 3, 3, 0] if overlap else [3] * 4,  # with overlap, each step sees the launch of the next
        HostPart.MASKS: [0] * 4,
        HostPart.WAIT: [5] * 4,
        HostPart.PROCESS: [0] * 4,
        HostPart.HAND_OVER: [0, 2, 2, 2],  # for the step before
    }
    assert sum(snapshot.host_ns.values()) == clock.now_ns - began_ns
    after_the_last = {HostPart.HAND_OVER: 2_000_000}
    assert snapshot.host_ns == {
        part: sum(step.host_ns[part] for step in steps) + after_the_last.get(part, 0) for part in HostPart
    }


def test_the_idle_time_in_snapshots_grows_and_never_goes_back() -> None:
    clock = Clock()
    inbox = Inbox()
    seen = []
    of_nobody = []
    runner = ScriptedRunner(gated=True)

    def look() -> None:
        numbers = engine.snapshot()
        seen.append(numbers.host_ns[HostPart.IDLE])
        of_nobody.append((numbers.nobody_machine_ns, numbers.nobody_core_ns - began_ns))

    began_ns = clock.now_ns
    with make_engine(runner, clock_ns=clock, cores_ns=clock, tokenize_workers=0) as engine:
        for name in ("a", "b", "c"):
            wait_until_idle(engine)
            clock.move(10)
            look()
            clock.move(5)
            engine.submit(request(name, max_tokens=1), inbox)
            runner.started.get()
            clock.move(60)  # a step under way is no idle time, and nothing is published before it ends
            look()
            runner.permit()
            inbox.wait_terminal(name)
            look()
        after = engine.snapshot().host_ns
    assert of_nobody == [(ns, ns) for ns in seen], "dashboards show the share of the engine's time that is free"
    assert [ns // 10**9 for ns in seen] == [10, 15, 15, 25, 30, 30, 40, 45, 45]
    assert after[HostPart.LAUNCH] == 180_000_000_000
