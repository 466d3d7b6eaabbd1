"""Whose requests a request waited for: in the queue, and in its steps."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from oaiserve.engine.request import Request, Terminal
from oaiserve.facts.record import OF_NEIGHBOURS, Cause, Origin, OthersTime, WaitReason, Whose
from tests.engine.accounts.lab import MS, Lab, mixed
from tests.engine.accounts.pictures import media_of, picture
from tests.engine.doubles import Inbox, request


def of(client: str, sent: Request, *, has_key: bool = True) -> Request:
    """Return the request as this client's, who has a key of this name, or only an address."""
    return replace(sent, client=client, origin=Origin(client=client if has_key else None))


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    with lab.engine:
        lab.learn()
        yield lab


def others_of(ended: Terminal, phase: str) -> list[OthersTime]:
    return ended.account.others_ns.get(phase, [])


def test_a_request_alone_waited_for_nobody(lab: Lab) -> None:
    ended = lab.run(of("alice", request("a", prompt_len=300, max_tokens=20, n=3)))
    assert ended["a"].account.others_ns == {}


@pytest.mark.parametrize(
    ("client", "has_key", "expected"),
    [
        ("batchjob", True, (Whose.OTHER_CLIENT, "batchjob")),
        ("192.0.2.1", False, (Whose.OTHER_CLIENT, None)),
        ("alice", True, (Whose.SAME_CLIENT, "alice")),
    ],
)
def test_the_client_of_a_long_prompt_beside_is_named(
    lab: Lab, client: str, has_key: bool, expected: tuple[Whose, str | None]
) -> None:
    light = of("alice", request("a", prompt_len=4, max_tokens=40))
    heavy = of(client, request("b", prompt_len=2000, max_tokens=1), has_key=has_key)
    ended = lab.run(light, heavy, after=4)
    prompts_ns = ended["a"].account.decode_causes_ns[Cause.NEIGHBOUR_PROMPTS]
    assert prompts_ns > 500 * MS
    assert others_of(ended["a"], "decode") == [OthersTime(*expected, prompts_ns, 0, 0)]


def test_what_several_clients_add_is_divided_by_their_rows(lab: Lab) -> None:
    light = of("alice", request("a", prompt_len=1, max_tokens=60))
    many = of("batchjob", request("b", prompt_len=1, max_tokens=60, n=9))
    few = of("carol", request("c", prompt_len=1, max_tokens=60, n=3))
    ended = lab.run(light, many, few)
    first, second = others_of(ended["a"], "decode")
    assert (first.client, second.client) == ("batchjob", "carol")
    assert first.decodes_ns / second.decodes_ns == pytest.approx(3, rel=0.1)
    assert first.decodes_ns + second.decodes_ns == ended["a"].account.decode_causes_ns[Cause.NEIGHBOUR_DECODES]


def test_the_own_part_of_a_client_with_two_requests_is_left_out(lab: Lab) -> None:
    one = of("alice", request("a", prompt_len=1, max_tokens=60))
    two = of("alice", request("b", prompt_len=1, max_tokens=60, n=2))
    three = of("carol", request("c", prompt_len=1, max_tokens=60, n=2))
    ended = lab.run(one, two, three)
    first, second = others_of(ended["a"], "decode")
    assert {first.whose, second.whose} == {Whose.SAME_CLIENT, Whose.OTHER_CLIENT}
    assert first.decodes_ns == pytest.approx(second.decodes_ns, rel=0.1)


def test_a_request_waits_in_the_queue_for_prompts_of_another_client() -> None:
    lab = Lab(policy="fcfs", max_running=1)
    with lab.engine:
        lab.learn()
        heavy = of("batchjob", request("b", prompt_len=3000, max_tokens=1))
        ended = lab.run(heavy, of("alice", request("a", prompt_len=4, max_tokens=2)))
    (found,) = others_of(ended["a"], "queue")
    waited_ns = sum(ended["a"].account.waits_ns.values())
    assert (found.whose, found.client) == (Whose.OTHER_CLIENT, "batchjob")
    assert 0.8 * waited_ns < found.prompts_ns <= waited_ns
    assert waited_ns > 100 * MS


def test_a_request_that_arrives_in_a_step_waits_for_those_in_the_step(lab: Lab) -> None:
    inbox = Inbox()
    inbox.live_in(lab.engine.world)
    light = of("alice", request("a", prompt_len=4, max_tokens=2))
    lab.in_step.append(lambda: lab.engine.submit(light, inbox))
    lab.run(of("batchjob", request("b", prompt_len=200, max_tokens=1)))
    ended = inbox.wait_terminal("a")["a"]
    (found,) = others_of(ended, "queue")
    assert (found.client, ended.account.waits_ns) == (
        "batchjob",
        {WaitReason.STEP_UNDER_WAY: near_to(found.prompts_ns)},
    )


def near_to(ns: int) -> object:
    return pytest.approx(ns, rel=0.1)


def test_others_are_named_while_it_is_not_known_what_steps_take() -> None:
    lab = Lab()
    with lab.engine:
        light = of("alice", request("a", prompt_len=4, max_tokens=40))
        ended = lab.run(light, of("batchjob", request("b", prompt_len=2000, max_tokens=1)), after=2)
    causes_ns = ended["a"].account.decode_causes_ns
    (found,) = others_of(ended["a"], "decode")
    assert Cause.ALONE not in causes_ns
    assert (found.whose, found.client) == (Whose.OTHER_CLIENT, "batchjob")
    assert 0.5 * causes_ns[Cause.NOT_KNOWN_YET] < found.prompts_ns < causes_ns[Cause.NOT_KNOWN_YET]


def test_pictures_of_another_client_are_its_time() -> None:
    def encode(_: str) -> None:
        lab.clock.now_ns += 7 * MS

    lab = Lab(media=media_of(encode))
    with lab.engine:
        lab.learn()
        pictures = of("batchjob", picture("b", 5, max_tokens=1))
        ended = lab.run(of("alice", request("a", prompt_len=4, max_tokens=31)), pictures, after=1)
    assert [each.media_ns for each in others_of(ended["a"], "decode")] == [5 * 7 * MS]


def test_the_time_of_others_is_that_of_the_causes_whatever_overlaps(overlap: bool) -> None:
    """Prompts in chunks, several choices, preemptions, media, and requests of five clients that come amid others."""
    rng = random.Random(11)

    def encode(_: str) -> None:
        lab.clock.now_ns += rng.choice([0, 2 * MS])

    lab = Lab(kv_blocks=60, max_model_len=200, max_running=6, max_step_tokens=24, media=media_of(encode))
    clients = ["alice", "batchjob", "carol", "192.0.2.1", "192.0.2.2"]
    lost_ns = whole_ns = 0
    with lab.engine:
        for number in range(8):
            some = mixed(rng)
            names = rng.choices(clients, k=len(some))
            sent = [of(name, each, has_key="." not in name) for name, each in zip(names, some, strict=True)]
            ended = lab.run(*sent, after=5 if number % 2 and some[0].params.max_tokens > 5 else 0)
            for each in ended.values():
                account = each.account
                for phase, causes_ns in [("prefill", account.prefill_causes_ns), ("decode", account.decode_causes_ns)]:
                    found = others_of(each, phase)
                    if Cause.ALONE not in causes_ns and Cause.NOT_KNOWN_YET in causes_ns:
                        assert sum(one.total_ns for one in found) <= causes_ns[Cause.NOT_KNOWN_YET]
                        continue
                    sums = [sum(getattr(one, kind) for one in found) for kind in OthersTime._fields[2:]]
                    for cause, ns in zip(OF_NEIGHBOURS, sums, strict=True):
                        assert ns in (0, causes_ns.get(cause, 0))
                        lost_ns += causes_ns.get(cause, 0) - ns
                        whole_ns += causes_ns.get(cause, 0)
                waits = others_of(each, "queue")
                assert sum(one.total_ns for one in waits) <= sum(account.waits_ns.values())
                assert all(min(one[2:]) >= 0 for phase in account.others_ns.values() for one in phase)
    assert 0 <= lost_ns < 0.01 * whole_ns


def test_a_request_notes_how_many_of_its_client_were_open_when_it_began_to_wait(lab: Lab) -> None:
    light = of("alice", request("a", prompt_len=4, max_tokens=40))
    heavy = [of("batchjob", request(name, prompt_len=400, max_tokens=9)) for name in "bcd"]
    ended = lab.run(light, *heavy)
    assert [ended[name].account.client_requests for name in "abcd"] == [1, 1, 2, 3]
