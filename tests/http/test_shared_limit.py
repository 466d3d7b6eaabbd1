"""A client that takes all of a limit leaves the others their shares."""

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.http.shared_limit import SharedLimit

MOST = 24
CLIENTS = "abcdefgh"
actions = st.lists(
    st.tuples(st.sampled_from(CLIENTS), st.one_of(st.integers(0, 2 * MOST), st.just("give back"))), max_size=80
)


@given(actions)
def test_a_share_is_always_to_be_had_and_the_sum_is_bounded(done: list[tuple[str, int | str]]) -> None:
    limit = SharedLimit(MOST)
    taken: dict[str, list[int]] = {client: [] for client in CLIENTS}
    largest_request = 0
    for client, action in done:
        total = sum(map(sum, taken.values()))
        assert limit.total == total
        if isinstance(action, int):
            waiting = {each: sum(numbers) for each, numbers in taken.items() if sum(numbers)}
            share = MOST // len(waiting.keys() | {client})
            without_largest = total - max(waiting.values(), default=0)
            got = limit.take(client, action)
            if not total or total + action <= MOST:
                assert got
            elif waiting.get(client, 0) + action <= share:
                assert got == (without_largest + action <= MOST)
            else:
                assert not got
            if got:
                taken[client].append(action)
                largest_request = max(largest_request, action)
        elif taken[client]:
            limit.give_back(client, taken[client].pop())
        assert limit.total <= MOST + max(MOST, largest_request)
    for client, numbers in taken.items():
        for number in numbers:
            limit.give_back(client, number)
    assert limit.total == 0


@given(st.integers(1, 200))
def test_one_client_cannot_keep_a_second_one_out(number: int) -> None:
    limit = SharedLimit(MOST)
    assert limit.take("greedy", number)
    assert all(limit.take("polite", 1) for _ in range(MOST // 2))
    assert not limit.take("greedy", MOST)
