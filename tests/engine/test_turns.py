"""Clients take turns, whatever is added, taken and put back."""

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.turns import Turns

CLIENTS = st.sampled_from("abcd")
actions = st.lists(
    st.one_of(st.tuples(st.just("add"), CLIENTS), st.just(("take", "")), st.tuples(st.just("put back"), CLIENTS)),
    max_size=80,
)


@given(actions)
def test_between_two_turns_of_a_client_each_other_one_that_waited_gets_one(done: list[tuple[str, str]]) -> None:
    turns: Turns[tuple[str, int]] = Turns()
    waiting: dict[str, list[int]] = {client: [] for client in "abcd"}
    owed: dict[str, set[str]] = {client: set() for client in "abcd"}  # the clients that must come before it
    for number, (action, client) in enumerate(done):
        if action == "add":
            turns.add(client, (client, number))
            waiting[client].append(number)
        elif action == "put back":
            turns.put_back(client, (client, number))
            waiting[client].insert(0, number)
        elif turns:
            taken, item = turns.take()
            assert item == waiting[taken].pop(0)
            assert not owed[taken]
            for others in owed.values():
                others.discard(taken)
            owed[taken] = {other for other in waiting if other != taken and waiting[other]}
    assert bool(turns) == any(waiting.values())
    assert set(turns._items) == set(turns._order) == {client for client, items in waiting.items() if items}
    left = turns.take_all()
    assert sorted(left) == sorted((client, item) for client, items in waiting.items() for item in items)
    assert not turns
