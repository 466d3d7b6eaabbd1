"""The encoder shares the engine thread's time with steps, encodes each medium once, and fails only who asked for it."""

from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.encoder import SHARE, SLICE_NS, Encoder, Ready
from oaiserve.engine.request import Request
from oaiserve.engine.tokenize import Tokenized
from oaiserve.engine.types.media import Encoded, Medium, PromptMedia, Vectors
from oaiserve.facts.engine_numbers import EngineNumbers

PIECE_NS = 4_000_000


class Floats:
    """Stands for a tensor of `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class FakeTower:
    """Takes five pieces of PIECE_NS for each medium."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.begun: list[bytes] = []
        self.broken: set[bytes] = set()
        self.error: type[BaseException] = RuntimeError
        self.done: set[bytes] = set()
        self.closed: set[str] = set()  # requests that have ended
        self.numbers = EngineNumbers()
        self.vectors = Vectors(250)

    def clock_ns(self) -> int:
        return self.now_ns

    def pieces(self, medium: Medium) -> Iterator[Encoded | None]:
        self.begun.append(medium.key)
        for _ in range(5):
            self.now_ns += PIECE_NS
            yield None
        if medium.key in self.broken:
            raise self.error("no such picture")
        self.done.add(medium.key)
        yield Encoded(Floats(100))


def tokenized(request_id: str, *keys: bytes, client: str = "", share: float = 1.0) -> Tokenized:
    media = tuple(Medium("image", key, 1, {"pixels": object()}) for key in keys)
    return Tokenized(
        Request(request_id, (), client=client, share=share),
        [[1]],
        media=[PromptMedia(media, array("i", range(len(keys))))],
    )


@pytest.fixture
def tower() -> FakeTower:
    return FakeTower()


def make_encoder(tower: FakeTower, *, by_client: bool = True) -> Encoder:
    def accounted(request: Request) -> AbstractContextManager[None] | None:
        return None if request.request_id in tower.closed else nullcontext()

    return Encoder(tower, tower.vectors, tower.clock_ns, tower.numbers, accounted, by_client=by_client)


@pytest.fixture
def encoder(tower: FakeTower) -> Encoder:
    return make_encoder(tower)


def turns(encoder: Encoder) -> list[Ready]:
    """Return the events until the encoder has no more work."""
    ended: list[Ready] = []
    while encoder.has_work:
        ended += encoder.turn(is_alone=True)
    return ended


def ids(ended: list[Ready]) -> list[str]:
    return [one.encoding.tokenized.request.request_id for one in ended]


def test_a_medium_of_several_requests_is_encoded_once_and_its_pixels_are_freed(
    encoder: Encoder, tower: FakeTower
) -> None:
    requests = [tokenized("a", b"1", b"2"), tokenized("b", b"2"), tokenized("c", b"1")]
    for one in requests:
        encoder.add(one)
    ended = turns(encoder)
    assert ids(ended) == ["c", "a", "b"]
    assert tower.begun == [b"1", b"2"]
    assert [sorted(one.encoding.encoded) for one in ended] == [[b"1"], [b"1", b"2"], [b"2"]]
    assert not any(
        medium.inputs for one in requests for media in one.media if media is not None for medium in media.media
    )
    assert encoder.add(tokenized("d", b"1")) == 1
    assert ids(turns(encoder)) == ["d"]
    assert tower.begun == [b"1", b"2"]
    numbers = tower.numbers
    assert (numbers.num_media_encoded, numbers.num_media_rows, numbers.media_cache_bytes) == (2, 2, 200)
    assert (numbers.num_media_queries, numbers.num_media_hits, numbers.num_encoding) == (5, 1, 0)


def test_pixels_of_a_medium_that_a_request_has_several_times_are_freed(encoder: Encoder, tower: FakeTower) -> None:
    request = tokenized("a", b"1", b"2", b"1")
    encoder.add(request)
    media = request.media[0]
    assert media is not None
    first, _, again = media.media
    assert first.inputs
    assert not again.inputs, "those of the first are enough"
    assert ids(turns(encoder)) == ["a"]
    assert tower.begun == [b"1", b"2"]
    assert not first.inputs


def test_a_prompt_is_ready_before_the_media_of_later_ones_are_encoded(encoder: Encoder, tower: FakeTower) -> None:
    one, two = (tokenized("a", key).media[0] for key in (b"1", b"2"))
    encoder.add(Tokenized(Request("a", ()), [[1]] * 4, media=[one, None, two, one]))
    seen = [(each.encoding, each.encoding.num_ready, len(tower.begun)) for each in encoder.turn(is_alone=True)]
    while encoder.has_work:
        seen += [(each.encoding, each.encoding.num_ready, len(tower.begun)) for each in encoder.turn(is_alone=True)]
    encoding = seen[0][0]
    assert seen == [(encoding, 2, 1), (encoding, 4, 2)]
    assert [len(encoding.take(number)) for number in range(3)] == [1, 0, 1]
    assert sorted(encoding.encoded) == [b"1"], "the last prompt needs it again"
    encoding.take(3)
    assert not encoding.encoded


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_a_broken_medium_fails_the_requests_that_have_it_and_no_others(
    error: type[BaseException], encoder: Encoder, tower: FakeTower
) -> None:
    tower.broken = {b"2"}
    tower.error = error
    for one in (tokenized("a", b"1", b"2"), tokenized("b", b"1"), tokenized("c", b"2")):
        encoder.add(one)
    ended = {one.encoding.tokenized.request.request_id: type(one.error) for one in turns(encoder)}
    assert ended == {"a": error, "b": type(None), "c": error}


def test_a_request_that_has_ended_is_left_and_its_medium_goes_on_only_for_others(
    encoder: Encoder, tower: FakeTower
) -> None:
    for one in (tokenized("a", b"1"), tokenized("b", b"2"), tokenized("c", b"1")):
        encoder.add(one)
    list(encoder.turn(is_alone=True))  # the first one is under way
    tower.closed = {"a", "b"}
    assert ids(turns(encoder)) == ["c"]
    assert tower.begun == [b"1"]


@pytest.mark.parametrize(("by_client", "before"), [(True, 1), (False, 20)])
def test_a_client_with_many_pictures_makes_another_wait_for_one_of_them(
    tower: FakeTower, by_client: bool, before: int
) -> None:
    encoder = make_encoder(tower, by_client=by_client)
    for number in range(20):
        encoder.add(tokenized(f"heavy {number}", bytes([number]), client="batchjob"))
    list(encoder.turn(is_alone=True))
    encoder.add(tokenized("light", b"light", client="alice"))
    assert ids(turns(encoder)).index("light") == before


def test_clients_with_many_pictures_share_the_encoder_by_their_shares(encoder: Encoder) -> None:
    for number in range(30):
        encoder.add(tokenized(f"a {number}", bytes([0, number]), client="alice"))
        encoder.add(tokenized(f"b {number}", bytes([1, number]), client="batchjob", share=0.5))
    first = ids(turns(encoder))[:30]
    assert sum(name.startswith("a") for name in first) == 20


def test_a_request_whose_pictures_are_cached_does_not_wait(encoder: Encoder, tower: FakeTower) -> None:
    encoder.add(tokenized("first", b"1"))
    turns(encoder)
    encoder.add(tokenized("new", b"2"))
    encoder.add(tokenized("again", b"1"))
    assert ids(list(encoder.turn(is_alone=True))) == ["again"]
    assert ids(turns(encoder)) == ["new"]


@given(st.lists(st.integers(1_000_000, 80_000_000), min_size=20, max_size=60))
def test_beside_steps_pieces_get_their_share_and_at_most_one_piece_more(steps_ns: list[int]) -> None:
    tower = FakeTower()
    encoder = make_encoder(tower)
    for number in range(200):
        encoder.add(tokenized(str(number), number.to_bytes(2, "little")))
    ends_ns = [tower.now_ns]
    worked_ns = 0
    for step_ns in steps_ns:
        tower.now_ns += step_ns
        before_ns = tower.now_ns
        list(encoder.turn(is_alone=False))
        worked_ns += tower.now_ns - before_ns
        ends_ns.append(tower.now_ns)
    assert worked_ns <= SHARE * ends_ns[-1] + PIECE_NS
    gaps_ns = [after - before - step for (before, after), step in zip(pairwise(ends_ns), steps_ns, strict=True)]
    assert max(gaps_ns) <= SLICE_NS + PIECE_NS


def test_alone_it_works_in_slices(encoder: Encoder, tower: FakeTower) -> None:
    encoder.add(tokenized("a", b"1", b"2"))
    list(encoder.turn(is_alone=True))
    assert SLICE_NS <= tower.now_ns < SLICE_NS + PIECE_NS


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 120)), max_size=60))
def test_the_cache_of_vectors_keeps_the_last_used_within_its_bytes(added: list[tuple[int, int]]) -> None:
    vectors = Vectors(250)
    order = dict[bytes, int]()
    for key, num_bytes in ((bytes([key]), num_bytes) for key, num_bytes in added):
        if (stored := vectors.get(key)) is not None:
            vectors.touch(key)
            order[key] = order.pop(key)
        else:
            assert stored is None
            vectors.add(key, Encoded(Floats(num_bytes)))
            order[key] = num_bytes
            while sum(order.values()) > 250:
                del order[next(iter(order))]
        assert {one: result.num_bytes for one in order if (result := vectors.get(one)) is not None} == order
        assert vectors.num_bytes == sum(order.values())


@given(st.lists(st.tuples(st.sampled_from(["add", "close", "break", "work"]), st.sets(st.integers(0, 4), min_size=1))))
def test_the_numbers_are_those_of_the_requests_that_wait(actions: list[tuple[str, set[int]]]) -> None:
    tower = FakeTower()
    encoder = make_encoder(tower)
    numbers = tower.numbers
    waiting: dict[str, set[bytes]] = {}
    for number, (action, media) in enumerate(actions):
        keys = {bytes([key]) for key in media}
        if action == "add":
            encoder.add(tokenized(str(number), *keys))
            waiting[str(number)] = {key for key in keys if tower.vectors.get(key) is None}
        elif action == "close":
            tower.closed |= {str(number - key) for key in media}
        elif action == "break":
            tower.broken = keys
        tower.done.clear()
        for name in ids(list(encoder.turn(is_alone=action == "work"))):
            del waiting[name]
        for missing in waiting.values():
            missing -= tower.done
        # A request that has ended is left when its turn comes.
        open_ones = [missing for name, missing in waiting.items() if name not in tower.closed]
        for number, all_of_them in (
            (numbers.num_encoding, (len(open_ones), len(waiting))),
            (numbers.num_waiting_media_rows, [len(set().union(*some)) for some in (open_ones, waiting.values())]),
        ):
            assert all_of_them[0] <= number <= all_of_them[1]
        assert numbers.media_cache_bytes == tower.vectors.num_bytes
    turns(encoder)
    assert (numbers.num_encoding, numbers.num_waiting_media_rows) == (0, 0)
