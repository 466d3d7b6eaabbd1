"""Graphs are captured when they are needed, or when there is time, and until then larger ones stand in."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.model.gpu.cuda_capture import Run
from oaiserve.engine.model.gpu.sized_graphs import SizedGraphs

ORDER = st.lists(st.integers(1, 40), min_size=1, unique=True).map(sorted)


@given(sizes=ORDER, steps=st.lists(st.integers(0, 40)), data=st.data())
def test_work_takes_the_smallest_graph_that_there_is_and_what_it_lacks_is_captured_next(
    sizes: list[int], steps: list[int], data: st.DataObject
) -> None:
    captured: list[int] = []

    def capture(size: int, _: object) -> Run:
        captured.append(size)
        return lambda: size

    first = {sizes[-1], *data.draw(st.lists(st.sampled_from(sizes)))}
    graphs = SizedGraphs(sizes, first, capture)
    assert captured == sorted(first, reverse=True)
    for number in steps:
        wanted = [size for size in sizes if size >= number][:1]
        usable = [size for size in captured if size >= number]
        found = graphs.find(lambda size, number=number: size >= number)
        assert (found and (found[0], found[1]())) == ((min(usable),) * 2 if usable else None)
        assert graphs.capture_next(only_wanted=True) == (wanted not in ([], [min(usable, default=0)]))
        assert set(wanted) <= set(captured)
    left = [size for size in reversed(sizes) if size not in captured]
    before = len(captured)
    while graphs.capture_next(only_wanted=False):
        pass
    assert captured[before:] == left
    assert graphs.num_captured == len(sizes)


def test_a_capture_that_fails_is_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def capture(size: int, _: object) -> Run:
        if size < 4:
            raise torch.OutOfMemoryError("no memory is left")
        return lambda: size

    graphs = SizedGraphs([1, 2, 4], [4], capture)
    with caplog.at_level(logging.WARNING):
        assert graphs.capture_next(only_wanted=False)
    assert not graphs.capture_next(only_wanted=False)
    assert "no memory is left" in caplog.text
    found = graphs.find(lambda size: True)
    assert found is not None
    assert found[0] == 4
