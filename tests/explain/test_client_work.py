"""The work by client: it is divided exactly, and clients that have gone are remembered for a while only."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.explain.client_work import (
    MOST_GONE,
    MOST_NAMED,
    ClientWork,
    Work,
    WorkByClient,
    beside,
    divided,
    while_waiting,
)
from oaiserve.facts.record import FURTHER_CLIENTS, OthersTime, Whose

NAMES = ["a", "b", "c", "d"]


@given(st.integers(0, 10**15), st.lists(st.integers(0, 10**6), max_size=9))
def test_an_amount_is_divided_into_integers_that_add_up_to_it(amount: int, weights: list[int]) -> None:
    clients = {ClientWork(str(number), None): weight for number, weight in enumerate(weights)}
    parts = divided(amount, clients)
    assert sum(parts.values()) == (amount if any(weights) else 0)
    assert all(abs(part - amount * clients[client] / sum(weights)) < len(weights) + 1 for client, part in parts.items())


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_the_work_since_a_phase_began_is_that_of_its_steps(steps: list[tuple[str, int, int]]) -> None:
    work = WorkByClient()
    clients = {name: work.opened(name, name) for name in NAMES}
    work.step_ended([(clients["a"], 5, 5), (clients["b"], 5, 5)], 1e6, 1e6)
    before = work.before(clients["a"])
    for name, prompt_tokens, decodes in steps:
        work.step_ended([(clients[name], prompt_tokens, decodes)], 1e6 * prompt_tokens, 2e6 * decodes)
    found = work.since(before, clients["a"], 0, 0)
    for name in set(NAMES) - {"a"}:
        tokens = sum(step[1] for step in steps if step[0] == name)
        rows = sum(step[2] for step in steps if step[0] == name)
        if tokens or rows:
            assert found[clients[name]][:2] == (tokens, rows)
            assert found[clients[name]][2:] == (1e6 * tokens, 2e6 * rows, 0)
        else:
            assert clients[name] not in found
    assert clients["a"] not in found, "all of it was this request's own"


def test_few_clients_without_open_requests_are_remembered() -> None:
    work = WorkByClient()
    stays = work.opened("stays", None)
    for number in range(3 * MOST_GONE):
        work.closed(work.opened(str(number), None))
    assert len(work.before(stays).work) == 1 + MOST_GONE
    assert work.lone is stays


def test_a_client_that_leaves_during_a_phase_is_still_named() -> None:
    work = WorkByClient()
    own = work.opened("own", "own")
    other = work.opened("other", "other")
    before = work.before(own)
    work.step_ended([(own, 0, 1), (other, 100, 0)], 1e6, 1e6)
    work.closed(other)
    (found,) = beside(work.since(before, own, 0, 1), own, 900, 0, 0)
    assert found == (Whose.OTHER_CLIENT, "other", 900, 0, 0)


def test_a_phase_that_began_in_the_last_step_has_that_step() -> None:
    work = WorkByClient()
    own = work.opened("own", "own")
    other = work.opened("other", "other")
    work.step_ended([(other, 100, 0)], 1e6, 0)
    work.step_ended([(other, 50, 3)], 2e6, 3e6)
    before = work.before(own, in_last_step=True)
    assert work.since(before, own, 0, 0) == {other: (50, 3, 2e6, 3e6, 0)}
    work.step_of_one(other, Work(7, 0, 1e6, 0.0))
    assert work.since(work.before(own), own, 0, 0) == {}
    assert work.since(work.before(own, in_last_step=True), own, 0, 0) == {other: (7, 0, 1e6, 0.0, 0)}


@given(st.lists(st.sampled_from([*NAMES, ""]), min_size=1, max_size=20), st.integers(0, 10**9))
def test_a_step_of_decodes_alone_is_divided_like_any_step(names: list[str], decodes_ns: int) -> None:
    found = []
    for is_plain in (True, False):
        work = WorkByClient()
        clients = {name: work.opened(name, name) for name in NAMES}
        chunks = [clients.get(name) for name in names]
        if is_plain:
            work.decodes_ended(chunks, decodes_ns)
        else:
            work.step_ended([(client, 0, 1) for client in chunks], 0.0, decodes_ns)
        found.append({name: client.work for name, client in clients.items()})
    assert found[0] == found[1]


def test_clients_after_the_first_few_count_as_one_apart_from_those_without_a_key() -> None:
    work = WorkByClient()
    own = work.opened("own", "own")
    others = [work.opened(f"{number}", f"{number}") for number in range(MOST_NAMED + 3)]
    others.append(work.opened("10.0.0.1", None))
    before = work.before(own)
    work.step_ended([(own, 0, 1), *((other, 100 - i, 0) for i, other in enumerate(others))], 1e6, 1e6)
    found = beside(work.since(before, own, 0, 1), own, 10_000, 0, 0)
    named = [one.client for one in found if one.client not in (None, FURTHER_CLIENTS)]
    assert named == [str(number) for number in range(MOST_NAMED)]
    assert {one.client for one in found} == {*named, FURTHER_CLIENTS, None}
    assert sum(one.prompts_ns for one in found) == 10_000


def test_a_copy_of_the_work_reads_only_the_clients_of_the_steps_since_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = WorkByClient()
    clients = [work.opened(f"{number}", f"{number}") for number in range(100)]
    read: list[ClientWork] = []
    work_of = ClientWork.work.fget
    assert work_of is not None
    monkeypatch.setattr(ClientWork, "work", property(lambda self: read.append(self) or work_of(self)))
    for first in (0, 10):
        work.step_ended([(client, 3, 0) for client in clients[first : first + 4]], 1e6, 0.0)
        work.step_ended([(client, 0, 1) for client in clients[first + 2 : first + 6]], 0.0, 1e6)
        work.before(clients[50])
        before = work.before(clients[51], in_last_step=True)
        assert {*read} == {*clients[first : first + 6]}
        read.clear()
        assert work.since(before, clients[51], 0, 0) == {
            client: Work(decodes=1, decodes_ns=0.25e6) for client in clients[first + 2 : first + 6]
        }


MANY_NAMES = [None, *(f"key {number}" for number in range(MOST_NAMED + 4))]
WORKS = st.builds(
    Work,
    prompt_tokens=st.integers(0, 10**6),
    decodes=st.integers(0, 10**4),
    prompts_ns=st.integers(0, 10**12).map(float),
    decodes_ns=st.integers(0, 10**12).map(float),
    media_ns=st.integers(0, 10**12),
)


def works_of(found: list[tuple[str | None, Work]]) -> dict[ClientWork, Work]:
    return {ClientWork(f"{number}", name): work for number, (name, work) in enumerate(found)}


def times_of(others: list[OthersTime]) -> list[int]:
    return [
        sum(one.prompts_ns for one in others),
        sum(one.decodes_ns for one in others),
        sum(one.media_ns for one in others),
    ]


@given(
    st.lists(st.tuples(st.sampled_from(MANY_NAMES), WORKS), max_size=3 * MOST_NAMED),
    st.integers(0, 3 * MOST_NAMED),
    st.tuples(*[st.integers(0, 10**15)] * 3),
)
def test_times_of_named_and_unnamed_clients_add_up_to_all_that_others_added(
    clients: list[tuple[str | None, Work]], which: int, amounts: tuple[int, int, int]
) -> None:
    works = works_of(clients)
    own = [*works, ClientWork("own", "own")][min(which, len(works))]
    found = beside(works, own, *amounts)
    weights = [sum(work[place] for work in works.values()) for place in (0, 1, 4)]
    assert times_of(found) == [ns if weight else 0 for ns, weight in zip(amounts, weights, strict=True)]
    assert len({(one.whose, one.client) for one in found}) == len(found) <= MOST_NAMED + 3
    assert found == sorted(found, key=lambda one: -one.total_ns)
    others = {client.name for client in works if client is not own and client.name is not None}
    named = {one.client for one in found if one.whose is Whose.OTHER_CLIENT} - {None, FURTHER_CLIENTS}
    assert named <= others


@given(st.lists(st.tuples(st.sampled_from(MANY_NAMES), WORKS), max_size=3 * MOST_NAMED), st.integers(0, 10**14))
def test_a_wait_is_never_divided_into_more_than_it_took(clients: list[tuple[str | None, Work]], waited: int) -> None:
    works = works_of(clients)
    whole = sum(work.total_ns for work in works.values())
    times = times_of(while_waiting(works, ClientWork("own", "own"), waited))
    assert min(waited, whole) - 3 * (MOST_NAMED + 3) - 1e-9 * whole <= sum(times) <= min(waited, whole) * (1 + 1e-9)


CHANGES = st.one_of(
    st.tuples(st.just("step"), st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9), st.integers(0, 9)))),
    st.tuples(st.just("decodes"), st.lists(st.sampled_from(NAMES), min_size=1)),
    st.tuples(st.just("media"), st.sampled_from(NAMES)),
    st.tuples(st.just("opened"), st.sampled_from([*NAMES, "new"])),
    st.tuples(st.just("phase"), st.booleans()),
)


@given(st.lists(CHANGES, max_size=30))
def test_phases_that_share_a_copy_of_the_work_find_the_same_as_with_copies_of_their_own(changes: list[Any]) -> None:
    work = WorkByClient()
    clients = {name: work.opened(name, name) for name in NAMES}
    before_step = now = {client: client.work for client in clients.values()}
    phases = []
    for kind, details in changes:
        if kind == "step":
            work.step_ended([(clients[name], tokens, rows) for name, tokens, rows in details], 3e6, 5e6)
        elif kind == "decodes":
            work.decodes_ended([clients[name] for name in details], 7e6)
        elif kind == "media":
            work.encoded(clients[details], 11)
            before_step = {
                client: then._replace(media_ns=then.media_ns + 11 * (client is clients[details]))
                for client, then in before_step.items()
            }
        elif kind == "opened":
            clients[details] = work.opened(details, details)
        else:
            phases.append((work.before(clients["a"], in_last_step=details), before_step if details else now))
        if kind in ("step", "decodes"):
            before_step = now
        now = {client: client.work for client in clients.values()}
    for before, then in phases:
        found = work.since(before, clients["a"], 0, 0)
        for client in clients.values():
            if client is not clients["a"]:
                assert found.get(client, Work()) == pytest.approx(client.since(then.get(client, Work())))


def test_phases_that_end_with_the_same_step_share_a_copy_of_the_work() -> None:
    work = WorkByClient()
    a, b = (work.opened(name, name) for name in "ab")
    work.decodes_ended([a, b], 1e6)
    assert work.before(a).work is work.before(b).work
    assert work.before(a, in_last_step=True).work is work.before(b, in_last_step=True).work
    before = work.before(a)
    work.decodes_ended([a, b], 1e6)
    assert work.before(a).work is not before.work
