"""A valid `traceparent` continues the client's trace, and any other value starts a new trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.facts.trace import TraceContext

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


def test_a_valid_traceparent_is_continued() -> None:
    trace = TraceContext.from_headers(f"00-{TRACE_ID}-{PARENT_ID}-01", "vendor=1")
    assert trace.trace_id_hex == TRACE_ID
    assert trace.parent_span_id == int(PARENT_ID, 16)
    assert (trace.parent_sampled, trace.tracestate) == (True, "vendor=1")
    assert trace.span_id_hex != PARENT_ID


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True)])
def test_the_sampled_flag_is_the_lowest_bit(flags: str, sampled: bool) -> None:
    assert TraceContext.from_headers(f"00-{TRACE_ID}-{PARENT_ID}-{flags}", None).parent_sampled is sampled


def test_a_later_version_may_append_fields() -> None:
    assert TraceContext.from_headers(f"01-{TRACE_ID}-{PARENT_ID}-01-more", None).trace_id_hex == TRACE_ID


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "garbage",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-01-more",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID[:-1]}-{PARENT_ID}-01",
    ],
)
def test_an_invalid_traceparent_starts_a_new_trace(header: str | None) -> None:
    trace = TraceContext.from_headers(header, "vendor=1")
    assert trace.parent_span_id is None
    assert trace.tracestate is None
    assert trace.trace_id not in (0, int(TRACE_ID, 16))


@given(st.text(max_size=80))
def test_any_header_is_accepted(header: str) -> None:
    trace = TraceContext.from_headers(header, None)
    assert len(trace.trace_id_hex) == 32
    assert len(trace.span_id_hex) == 16
