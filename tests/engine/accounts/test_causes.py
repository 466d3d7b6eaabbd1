"""The causes of a request's time: they add up exactly, and each one that is injected is found under its name."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine import stepper
from oaiserve.engine.request import Grammar, Request, Terminal
from oaiserve.explain.causes import settled
from oaiserve.explain.step_cost import Load
from oaiserve.facts.record import Cause
from oaiserve.facts.step_record import HostPart
from tests.engine.accounts.lab import MS, TRUE, Lab, mixed
from tests.engine.accounts.pictures import media_of, picture
from tests.engine.doubles import request


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from(sorted(set(Cause) - {Cause.MODEL_LOAD, Cause.INSIDE_ENGINE, Cause.REFUSAL_DELAY})),
        st.integers(-(10**12), 10**12),
    )
)
def test_settled_parts_keep_their_sum_and_none_is_below_zero(parts: dict[Cause, int]) -> None:
    total = sum(parts.values())
    if total < 0:
        with pytest.raises(ValueError, match="less than nothing"):
            settled(parts)
        return
    result = settled(parts)
    assert sum(result.values()) == total
    assert all(ns > 0 for ns in result.values())
    if min(parts.values(), default=0) >= 0:
        assert result == {cause: ns for cause, ns in parts.items() if ns}


def test_time_that_was_expected_and_did_not_pass_is_taken_from_what_was_expected() -> None:
    parts = {Cause.ALONE: 30, Cause.NEIGHBOUR_DECODES: 10, Cause.HOST: 7, Cause.UNEXPLAINED: -4}
    assert settled(parts) == {Cause.ALONE: 27, Cause.NEIGHBOUR_DECODES: 9, Cause.HOST: 7}


# -- injected causes --------------------------------------------------------------------------------------------------


def causes_of(ended: Terminal) -> tuple[dict[Cause, int], dict[Cause, int]]:
    """Return the causes of both phases, which add up exactly."""
    times = ended.times
    account = ended.account
    assert sum(account.prefill_causes_ns.values()) == times.first_token - times.scheduled
    assert sum(account.decode_causes_ns.values()) == times.last_token - times.first_token
    return account.prefill_causes_ns, account.decode_causes_ns


@pytest.fixture
def lab() -> Iterator[Lab]:
    """An engine that has learnt the costs of its steps. It goes on learning, so that each test has its own."""
    lab = Lab()
    with lab.engine:
        lab.learn()
        yield lab


def near(ns: float) -> object:
    return pytest.approx(ns, rel=0.1)


def test_a_request_alone_is_its_own_cause(lab: Lab) -> None:
    prefill, decode = causes_of(lab.run(request("a", prompt_len=300, max_tokens=40))["a"])
    times = [
        sum(TRUE.expected_ns(load) for load, _ in lab.log if bool(load.prompt_tokens) == own) for own in (True, False)
    ]
    assert [prefill[Cause.ALONE], decode[Cause.ALONE]] == [near(ns) for ns in times]


@pytest.mark.parametrize(
    ("neighbour", "cause", "least_ns"),
    [
        (request("b", prompt_len=1, max_tokens=60, n=12), Cause.NEIGHBOUR_DECODES, 20 * MS),
        (request("b", prompt_len=2000, max_tokens=1), Cause.NEIGHBOUR_PROMPTS, 500 * MS),
    ],
    ids=["greedy", "a long prompt"],
)
def test_a_neighbour_is_found(lab: Lab, neighbour: Request, cause: Cause, least_ns: int) -> None:
    _, decode = causes_of(lab.run(request("a", prompt_len=4, max_tokens=40), neighbour, after=4)["a"])
    added_ns = 0
    for load, parts in lab.log:
        if "a" in parts and not parts["a"].prompt_tokens:
            decodes_ns = TRUE.expected_ns(load.without_prompts())
            is_prompts = cause is Cause.NEIGHBOUR_PROMPTS
            added_ns += TRUE.expected_ns(load) - decodes_ns if is_prompts else decodes_ns - TRUE.expected_ns(parts["a"])
    assert decode[cause] == near(added_ns)
    assert added_ns > least_ns


def test_the_neighbours_of_a_prompt_are_found(lab: Lab) -> None:
    ended = lab.run(request("a", prompt_len=4, max_tokens=40, n=8), request("b", prompt_len=600, max_tokens=1), after=8)
    prefill, _ = causes_of(ended["b"])
    in_steps = [(load, parts["b"]) for load, parts in lab.log if "b" in parts]
    alone_ns = sum(TRUE.expected_ns(own) for _, own in in_steps)
    assert prefill[Cause.ALONE] == near(alone_ns)
    assert prefill[Cause.NEIGHBOUR_DECODES] == near(sum(TRUE.expected_ns(load) for load, _ in in_steps) - alone_ns)


@pytest.mark.parametrize(
    ("stolen_ns", "is_asked", "deliver_ns", "cause"),
    [
        (4 * MS, True, 0, Cause.MACHINE),
        (0, True, 2 * MS, Cause.HOST),
        (5 * MS, False, 0, Cause.UNEXPLAINED),  # the machine does not tell
    ],
)
def test_time_that_something_takes_from_each_step_is_found(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, stolen_ns: int, is_asked: bool, deliver_ns: int, cause: Cause
) -> None:
    if not is_asked:
        monkeypatch.setattr(lab.machine, "delay_ns", lambda: 0)
    lab.machine.stolen_ns = stolen_ns
    _, decode = causes_of(lab.run(request("a", prompt_len=4, max_tokens=31), deliver_ns=deliver_ns)["a"])
    assert decode[cause] == near(30 * (stolen_ns + deliver_ns))


def test_a_machine_that_is_busy_from_the_start_on_is_not_learnt_as_a_slow_one() -> None:
    lab = Lab()
    lab.machine.stolen_ns = 70 * MS
    with lab.engine:
        prefill, decode = causes_of(lab.run(request("first", prompt_len=200, max_tokens=3))["first"])
        assert (prefill.get(Cause.ALONE), decode.get(Cause.ALONE)) == (None, None)
        assert prefill[Cause.NOT_KNOWN_YET] > 0 < decode[Cause.NOT_KNOWN_YET]
        lab.learn()
        prefill, decode = causes_of(lab.run(request("later", prompt_len=200, max_tokens=41))["later"])
        slowed_ns = lab.engine.step_cost.expected_ns(Load(1, draws=1))
    prefill_ns, decode_ns = (
        sum(TRUE.expected_ns(load) for load, _ in lab.log if bool(load.prompt_tokens) == has) for has in (True, False)
    )
    assert [prefill[Cause.ALONE], decode[Cause.ALONE]] == [near(prefill_ns), near(decode_ns)]
    assert decode[Cause.MACHINE] == near(40 * 70 * MS)
    assert slowed_ns > 5 * TRUE.expected_ns(Load(1, draws=1)), "what is scheduled by time counts with the machine"


@pytest.mark.parametrize("is_in_step", [True, False])
def test_a_standstill_of_the_process_is_found_and_logged(
    lab: Lab, caplog: pytest.LogCaptureFixture, is_in_step: bool
) -> None:
    still_ns = 80_000 * MS
    if is_in_step:
        lab.still_in_step_ns = still_ns
    else:
        lab.still_between_ns = still_ns
    prefill, decode = causes_of(lab.run(request("a", prompt_len=4, max_tokens=31))["a"])
    with_it, without = (prefill, decode) if is_in_step else (decode, prefill)
    assert with_it[Cause.STANDSTILL] == near(still_ns)
    assert sum(with_it.values()) - with_it[Cause.STANDSTILL] < 1000 * MS
    assert Cause.STANDSTILL not in without
    assert [each.message for each in caplog.records if "stood still for 80.0 s" in each.message]


@pytest.mark.parametrize("has", ["used cores", "looked"])
def test_a_process_that_did_anything_did_not_stand_still(lab: Lab, monkeypatch: pytest.MonkeyPatch, has: str) -> None:
    still_ns = 80_000 * MS
    watchdog = lab.engine._loop.watchdog
    lab.still_in_step_ns = still_ns

    def use_cores(ns: int) -> None:
        lab.clock.now_ns += ns

    if has == "used cores":
        monkeypatch.setattr(lab, "_stand_still", use_cores)
    else:
        watchdog.num_looks += 79
    prefill, _ = causes_of(lab.run(request("a", prompt_len=4, max_tokens=3))["a"])
    assert Cause.STANDSTILL not in prefill
    assert prefill[Cause.UNEXPLAINED] == near(still_ns)


def test_a_step_after_a_standstill_is_expected_to_take_as_long_as_before(lab: Lab) -> None:
    before = lab.engine.step_cost
    lab.still_in_step_ns = 80_000 * MS
    lab.run(request("a", prompt_len=4, max_tokens=31))
    load = Load(decodes=1, draws=1)
    assert lab.engine.step_cost.expected_ns(load) == pytest.approx(before.expected_ns(load), rel=0.05)


def test_a_slow_mask_is_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = stepper.fill_masks

    def slow(*arguments: object) -> object:
        lab.clock.now_ns += 3 * MS
        return fill(*arguments)

    monkeypatch.setattr(stepper, "fill_masks", slow)
    constrained = request("a", prompt_len=4, max_tokens=21, grammar=Grammar("regex", "[a-z]{60}"))
    _, decode = causes_of(lab.run(constrained)["a"])
    assert decode[Cause.CONSTRAINT] == near(20 * 3 * MS)


def test_media_of_others_that_are_encoded_between_steps_are_a_cause_of_their_own() -> None:
    encoded_at_ns: list[int] = []

    def encode(_: str) -> None:
        lab.clock.now_ns += 7 * MS
        encoded_at_ns.append(lab.clock.now_ns)

    lab = Lab(media=media_of(encode))
    with lab.engine:
        lab.learn()
        before = lab.engine.snapshot()
        ended = lab.run(
            request("a", prompt_len=4, max_tokens=31), picture("b", 5, max_tokens=1), after=1, deliver_ns=2 * MS
        )
        numbers = lab.engine.snapshot()
    prefill, decode = causes_of(ended["a"])
    assert max(encoded_at_ns) < ended["a"].times.last_token, "all of it is encoded between steps of the first"
    assert (prefill.get(Cause.NEIGHBOUR_MEDIA, 0), decode[Cause.NEIGHBOUR_MEDIA]) == (0, 5 * 7 * MS)
    assert decode[Cause.HOST] == near(30 * 2 * MS)
    assert ended["b"].account.media.encode_ns == numbers.media_encode_ns == 5 * 7 * MS
    assert numbers.host_ns[HostPart.ENCODE] == numbers.media_encode_ns
    assert numbers.idle_with_work_ns - before.idle_with_work_ns == near(30 * 2 * MS)


def test_media_of_later_prompts_are_encoded_between_steps_and_nobody_elses() -> None:
    def encode(_: str) -> None:
        lab.clock.now_ns += 7 * MS

    lab = Lab(media=media_of(encode))
    with lab.engine:
        lab.learn()
        first = picture("a", 2, max_tokens=31)
        ended = lab.run(replace(first, prompts=(*first.prompts, *picture("b", 3).prompts)))["a"]
    prefill, decode = causes_of(ended)
    assert ended.times.media_encoded - ended.times.tokenized == 2 * 7 * MS
    assert prefill.get(Cause.OWN_MEDIA, 0) + decode.get(Cause.OWN_MEDIA, 0) == 3 * 7 * MS
    assert Cause.NEIGHBOUR_MEDIA not in prefill | decode
    assert ended.account.media.encode_ns == 5 * 7 * MS
    assert not ended.account.others_ns


def test_a_preemption_and_what_is_computed_again_is_found() -> None:
    small = Lab(kv_blocks=36, max_model_len=144, max_running=4)
    with small.engine:
        small.learn(longest=100, number=15)
        ended = small.run(*(request(f"{i}", prompt_len=30, max_tokens=50) for i in range(3)))
        log = small.log.copy()
    victims = [name for name, each in ended.items() if each.account.num_preemptions]
    assert victims
    for name in victims:
        prefill, decode = causes_of(ended[name])
        _, *later = (parts[name] for _, parts in log if name in parts)
        again_ns = sum(TRUE.expected_ns(own) for own in later if own.prompt_tokens)
        expected_ns = ended[name].account.stalled_ns + again_ns
        assert prefill.get(Cause.PREEMPTION, 0) + decode.get(Cause.PREEMPTION, 0) == near(expected_ns)


def test_the_causes_add_up_whatever_overlaps(overlap: bool) -> None:
    """Prompts in chunks, several choices, preemptions, grammars, media, and requests that come amid others."""
    rng = random.Random(7)

    def encode(_: str) -> None:
        lab.clock.now_ns += rng.choice([0, 2 * MS])

    lab = Lab(kv_blocks=60, max_model_len=200, max_running=6, max_step_tokens=24, media=media_of(encode))
    with lab.engine:
        for _ in range(6):
            some = mixed(rng)
            lab.machine.stolen_ns = rng.choice([0, 3 * MS])
            ended = lab.run(*some, after=rng.choice([0, 1, 5]) if some[0].params.max_tokens > 5 else 0, deliver_ns=MS)
            for each in ended.values():
                causes_of(each)


def test_without_explain_there_are_no_causes() -> None:
    lab = Lab(explain=False)
    with lab.engine:
        account = lab.run(request("a", prompt_len=4, max_tokens=8))["a"].account
        (step, *_) = lab.engine.take_steps()
    assert (account.prefill_causes_ns, account.decode_causes_ns, step.cost_error) == ({}, {}, None)
