"""The router: where requests go, and what holds whatever comes in whatever order."""

from array import array
from collections import Counter
from math import exp, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from oaiserve.wire.prefix_keys import BLOCK_BYTES, Prompt, marked_depths, prompt_of_text
from oaiserve.wire.report import MOST_KEYS, ReplicaReport
from oaiserve.wire.router import (
    BOUND,
    DEVIATIONS,
    FADING_NS,
    IDLE_LOAD,
    NEWS,
    SILENT_NS,
    TOKENS_PER_REQUEST,
    NoReplica,
    Router,
    order,
    score,
    seed_of,
)
from oaiserve.wire.routing_decision import Decision, Reason, as_text, of_text

NAMES = tuple(f"replica-{number}" for number in range(8))


def text(*words: str) -> bytes:
    """Return a text with a block for each word."""
    return b"".join(word.encode().ljust(BLOCK_BYTES, b".") for word in words)


def prompt(*words: str, salt: bytes = b"") -> Prompt:
    return prompt_of_text(text(*words), salt)


def make(names: tuple[str, ...] = NAMES[:4], most_prefixes: int = 1000) -> Router:
    router = Router(most_prefixes=most_prefixes)
    router.update_replicas(names, 0)
    return router


def report(
    name: str, number: int = 0, *, num_open: int = 0, held: Prompt | None = None, incarnation: str = "1"
) -> ReplicaReport:
    keys = array("Q", [] if held is None else (held.keys[depth - 1] for depth in marked_depths(len(held.keys))))
    return ReplicaReport(name, incarnation, number, num_open, 0, keys)


def test_the_next_turn_goes_where_the_talk_is() -> None:
    router = make()
    words = ["system", "turn 0"]
    first = router.choose(prompt(*words), 0)
    for turn in range(1, 20):
        router.choose(prompt("system", f"another talk {turn}"), 0)
        for name in NAMES[:4]:  # all are idle again
            router.learn(report(name, turn), 0)
        words.append(f"turn {turn}")
        decision = router.choose(prompt(*words), 0)
        assert (decision.replica, decision.reason) == (first.replica, Reason.PREFIX)
        assert decision.expected_hit_tokens == BLOCK_BYTES // 4 * (len(words) - 1)


def test_the_reasons_in_the_order_in_which_a_prefix_becomes_popular() -> None:
    router = make()
    reasons = [router.choose(prompt("system", "a"), 0).reason for _ in range(400)]
    assert reasons[0] is Reason.NEW
    assert reasons[1] is Reason.PREFIX  # an idle replica takes some
    assert Reason.SPILLED in reasons
    assert reasons.count(Reason.SPILLED) == 3  # until all four hold it


def test_a_decision_says_what_share_of_the_prompt_any_replica_holds() -> None:
    router = make(NAMES[:2])
    first = router.choose(prompt("system", "a"), 0)
    longer = prompt("system", "a", "b", "c")
    assert router.choose(longer, 0, without=[first.replica]).held_share == 0.5
    router = make(NAMES[:2])
    assert router.choose(prompt("new"), 0).held_share == 0
    assert router.choose(prompt("new"), 0).held_share == 1


def test_a_decision_says_what_it_is_expected_to_save() -> None:
    router = make()
    first = router.choose(prompt("a", "b", "c"), 0)
    second = router.choose(prompt("a", "b", "d"), 0)
    assert (first.expected_hit_tokens, second.expected_hit_tokens) == (0, 128)
    assert second.replica == first.replica
    assert second.load == pytest.approx(2 + (192 + 64) / 1024)
    assert second.load <= second.bound


def test_when_those_with_the_longest_prefix_are_busy_one_with_a_shorter_one_is_chosen() -> None:
    router = make()
    router.learn(report("replica-0", num_open=30, held=prompt("a", "b", "c")), 0)
    router.learn(report("replica-1", num_open=10, held=prompt("a", "b")), 0)
    for name in ("replica-2", "replica-3"):
        router.learn(report(name, num_open=10), 0)
    decision = router.choose(prompt("a", "b", "c", "d"), 0)
    assert (decision.replica, decision.reason) == ("replica-1", Reason.SHORTER_PREFIX)


def test_a_small_common_beginning_does_not_hold_requests_together() -> None:
    router = make()
    router.learn(report("replica-0", num_open=1, held=prompt("a")), 0)
    chosen = {router.choose(prompt("a", *(f"{number} {word}" for word in range(9))), 0).replica for number in range(9)}
    assert len(chosen) == 4


def test_a_session_stays_with_its_replica_however_little_the_others_have_to_do() -> None:
    router = make(NAMES)
    decisions = [router.choose(prompt(f"turn {turn}"), turn, session="s") for turn in range(3)]
    assert len({decision.replica for decision in decisions}) == 1
    assert len({router.choose(prompt(f"{n}"), 9, session=f"s{n}").replica for n in range(30)}) > 4


def test_what_a_full_report_has_no_room_for_is_still_expected() -> None:
    router = make(most_prefixes=2 * MOST_KEYS)
    router.learn(report("replica-2", 0, held=prompt("a", "b")), 0)
    router.learn(ReplicaReport("replica-2", "1", 1, 0, 0, array("Q", range(MOST_KEYS))), 0)
    assert router.choose(prompt("a", "b", "c"), 0).replica == "replica-2"


AB = ("a", "b")


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        # Another router finds what was reported.
        ([report("replica-2", held=prompt(*AB))], ("replica-2", Reason.PREFIX)),
        # What a report with room no longer names is no longer expected.
        ([report("replica-2", 0, held=prompt(*AB)), report("replica-2", 1)], (None, Reason.NEW)),
        # A report that comes late is ignored.
        ([report("replica-2", 5, held=prompt(*AB)), report("replica-2", 4, num_open=99)], ("replica-2", Reason.PREFIX)),
        # A replica that was started again holds nothing.
        ([report("replica-2", 7, held=prompt(*AB)), report("replica-2", 0, incarnation="2")], (None, Reason.NEW)),
        # A report of a replica that is no member changes nothing.
        ([report("replica-7", held=prompt(*AB))], (None, Reason.NEW)),
    ],
)
def test_reports_say_where_a_prefix_is(reports: list[ReplicaReport], expected: tuple[str | None, Reason]) -> None:
    router = make()
    for one in reports:
        router.learn(one, 0)
    decision = router.choose(prompt(*AB, "c"), 0)
    name, reason = expected
    assert decision.reason is reason
    assert decision.replica in NAMES[:4] if name is None else decision.replica == name
    assert len(router.holders) == 3


def test_a_silent_replica_is_chosen_only_if_all_are_silent_and_again_when_it_reports() -> None:
    router = make(NAMES[:2])
    router.learn(report("replica-0"), SILENT_NS - 1)
    assert {router.choose(prompt(f"{n}"), SILENT_NS).replica for n in range(20)} == {"replica-0"}
    assert {router.choose(prompt(f"{n}"), 3 * SILENT_NS).replica for n in range(60)} == {*NAMES[:2]}
    router.learn(report("replica-1", 1), 3 * SILENT_NS)
    assert {router.choose(prompt(f"{n}"), 3 * SILENT_NS).replica for n in range(20)} == {"replica-1"}
    router.learn(report("replica-0", 2), 3 * SILENT_NS + 1)
    assert {router.choose(prompt(f"{n}"), 3 * SILENT_NS + 1).replica for n in range(60)} == {*NAMES[:2]}


def test_when_a_replica_leaves_or_joins_only_its_own_talks_move() -> None:
    prompts = [prompt(f"{number}") for number in range(400)]

    def places(names: tuple[str, ...]) -> list[str]:
        chosen = []
        for one in prompts:
            router = make(names)  # idle, so that loads decide nothing
            chosen.append(router.choose(one, 0, session=f"session {one.conversation}").replica)
        return chosen

    with_it = places(NAMES)
    without_it = places(NAMES[1:])
    pairs = [*zip(with_it, without_it, strict=True)]
    assert all(a == b for a, b in pairs if a != NAMES[0])
    assert 20 < with_it.count(NAMES[0]) < 90
    assert {b for a, b in pairs if a == NAMES[0]} == {*NAMES[1:]}


def test_equal_prompts_spread_over_the_fleet_in_proportion_to_the_bound() -> None:
    router = make(NAMES)
    chosen = Counter(router.choose(prompt("a", "b"), 0).replica for _ in range(1600))
    assert len(chosen) == 7  # 1.25 times the mean of eight
    assert max(chosen.values()) <= BOUND * 200 + 1


def test_a_replica_that_ends_requests_more_slowly_gets_fewer_of_them() -> None:
    router = make(NAMES[:2])
    chosen: Counter[str] = Counter()
    for second in range(20):
        now_ns = second * 10**9
        chosen += Counter(router.choose(prompt(f"{second} {n}"), now_ns).replica for n in range(50))
        router.learn(report("replica-0", second, num_open=100), now_ns)
        router.learn(report("replica-1", second, num_open=10), now_ns)
    assert chosen["replica-1"] > 1.5 * chosen["replica-0"]


@given(
    words=st.lists(st.lists(st.sampled_from("abc"), max_size=4), min_size=1, max_size=60),
    loads=st.lists(st.integers(0, 100), min_size=3, max_size=3),
)
def test_routers_that_know_the_same_choose_the_same_and_salts_never_share(
    words: list[list[str]], loads: list[int]
) -> None:
    names = NAMES[:3]
    routers = [make(names), make(names[::-1]), make(names)]
    for router in routers:
        for name, load in zip(names, loads, strict=True):
            router.learn(report(name, num_open=load, held=prompt("a", "b")), 0)
    for one in words:
        decisions = [router.choose(prompt(*one), 0) for router in routers]
        assert len({*decisions}) == 1
    for router in routers:
        for one in words:
            assert router.choose(prompt(*one, salt=b"other"), 0).expected_hit_tokens <= 64 * len(one)
        fresh = make(names)
        for one in words:
            fresh.choose(prompt(*one), 0)
        assert fresh.choose(prompt(*words[0], salt=b"other"), 0).reason is Reason.NEW


class RouterMachine(RuleBasedStateMachine):
    """Replicas come, go, die and report or not, in any order; requests are placed within the bound all the same."""

    MOST_PREFIXES = 60

    @initialize()
    def begin(self) -> None:
        self.router = Router(most_prefixes=self.MOST_PREFIXES)
        self.now_ns = 0
        self.members: set[str] = set()
        self.excluded: set[str] = set()
        self.reported: set[str] = set()
        self.heard_ns: dict[str, int] = {}
        self.sent: dict[str, list[tuple[int, float]]] = {}  # when, and how much
        self.rest: dict[str, float] = {}
        self.number = 0

    def load(self, name: str) -> float:
        faded = sum(weight * exp((at_ns - self.now_ns) / FADING_NS) for at_ns, weight in self.sent[name])
        return faded + self.rest[name]

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def change(self, names: set[str]) -> None:
        for name in names - self.members:
            self.heard_ns[name] = self.now_ns
            self.sent[name] = []
            self.rest[name] = 0.0
            self.excluded.discard(name)
            self.reported.discard(name)
        self.members = names
        self.router.update_replicas(names, self.now_ns)

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.now_ns += seconds * 10**9

    @rule(name=st.sampled_from(NAMES), num_open=st.integers(0, 60), words=st.lists(st.sampled_from("abc"), max_size=4))
    def report(self, name: str, num_open: int, words: list[str]) -> None:
        self.number += 1
        self.router.learn(report(name, self.number, num_open=num_open, held=prompt(*words)), self.now_ns)
        if name in self.members:
            is_followed = name in self.reported - self.excluded and self.now_ns - self.heard_ns[name] < SILENT_NS
            self.rest[name] += (NEWS if is_followed else 1) * (num_open - self.load(name))
            self.heard_ns[name] = self.now_ns
            self.reported.add(name)
            self.excluded.discard(name)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def exclude(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.members)))
        self.excluded.add(name)
        self.router.exclude(name, self.now_ns)

    @rule(
        words=st.lists(st.sampled_from("abc"), max_size=6),
        session=st.sampled_from([None, None, "s", "t"]),
        number=st.integers(1, 30),
    )
    def choose(self, words: list[str], session: str | None, number: int) -> None:
        if not self.members:
            with pytest.raises(NoReplica, match="there is no replica"):
                self.router.choose(prompt(*words), self.now_ns, session)
            return
        for _ in range(number):
            self.check(self.router.choose(prompt(*words), self.now_ns, session), words)

    def check(self, decision: Decision, words: list[str]) -> None:
        fit = {
            name for name in self.members - self.excluded if self.now_ns - self.heard_ns[name] < SILENT_NS
        } or self.members
        assert decision.replica in fit, "it is dead, silent or gone"
        weight = decision.load - self.load(decision.replica)
        assert weight + 1e-4 >= 1
        mean = sum(self.load(name) for name in fit) / len(fit)
        self.sent[decision.replica].append((self.now_ns, weight))
        as_new = 1 + BLOCK_BYTES // 4 * len(words) / TOKENS_PER_REQUEST
        by_chance = DEVIATIONS * sqrt(max(mean, 0) + IDLE_LOAD)
        bound = max(BOUND * (mean + as_new / len(fit)), mean + by_chance + as_new - 1)
        assert weight <= as_new + 1e-4
        assert decision.load <= bound + 1e-4, "it was busy"
        assert decision.bound == pytest.approx(bound, abs=1e-4)
        assert decision.expected_hit_tokens <= 64 * len(words)
        assert len(self.router.holders) <= self.MOST_PREFIXES


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("replica", ["10.0.0.5:8000", "[fd00::5]:8000"])
def test_a_decision_is_read_from_its_header_and_anything_else_is_none(replica: str) -> None:
    decision = Decision(replica, Reason.PREFIX, 1088, 2, 1.25, 6.5)
    assert of_text(as_text(decision)) == decision._asdict()
    good = as_text(decision)
    for broken in ("", "x", good + " ", good.replace("6.5", "nan"), good.replace("prefix", "<b>"), good * 2):
        assert of_text(broken) == {}


def test_a_replica_that_has_refused_a_request_is_not_chosen_for_it_again() -> None:
    router = Router()
    router.update_replicas(NAMES, 0)
    prompt = prompt_of_text(b"x" * 40 * BLOCK_BYTES)
    refused: list[str] = []
    for _ in NAMES:
        refused.append(router.choose(prompt, 0, without=refused).replica)
    assert {*refused} == {*NAMES}
    with pytest.raises(NoReplica):
        router.choose(prompt, 0, without=refused)


# -- rendezvous hashing: a fair order for each key, in which little moves ---------------------------------------------

ADDRESSES = [f"10.0.0.{number}:8000" for number in range(16)]
numbers = st.integers(0, 2**64 - 1)


def ranked(key: int, names: list[str]) -> list[str]:
    return [names[position] for position in order(key, np.array([seed_of(name) for name in names], np.uint64))]


@given(key=numbers, seeds=st.lists(numbers, min_size=1, max_size=20, unique=True))
def test_the_order_is_that_of_the_scores(key: int, seeds: list[int]) -> None:
    expected = sorted(range(len(seeds)), key=lambda position: -score(key, seeds[position]))
    assert order(key, np.array(seeds, np.uint64)) == expected


def test_each_replica_is_first_for_its_share_of_keys() -> None:
    first = Counter(ranked(key, ADDRESSES)[0] for key in range(4000))
    assert len(first) == len(ADDRESSES)
    assert all(abs(number - 250) < 70 for number in first.values()), first  # 4.6 standard deviations


def test_what_is_first_with_one_is_second_with_all_others() -> None:
    second = Counter(names[1] for names in (ranked(key, ADDRESSES) for key in range(8000)) if names[0] == ADDRESSES[0])
    assert len(second) == len(ADDRESSES) - 1
