from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import EventSplitter

# JSON may contain these unescaped, and str.splitlines would cut at each of them.
TEXT = st.text(alphabet="ab{}:, é€\x0b\x0c\x1c\x85\u2028\u2029", min_size=1)


@given(st.lists(TEXT), st.sampled_from(["\n", "\r\n"]), st.data())
def test_events_are_the_same_however_the_bytes_are_split_into_reads(
    texts: list[str], newline: str, data: st.DataObject
) -> None:
    stream = "".join(f": a comment{newline}data: {text}{newline}{newline}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    splitter = EventSplitter()
    reads = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    events = [event for read in reads for event in splitter.feed(read)]
    assert events == [text.encode() for text in texts]


def test_lines_of_one_event_are_joined_and_other_fields_are_ignored() -> None:
    stream = b"event: x\nid: 1\ndata: one\ndata:two\nretry: 3\n\n\n\ndata: [DONE]\n\n"
    assert EventSplitter().feed(stream) == [b"one\ntwo", b"[DONE]"]


def test_an_event_without_its_blank_line_is_not_complete() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: one\n") == []
    assert splitter.feed(b"\n") == [b"one"]
