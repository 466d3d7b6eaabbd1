"""Graphs of one kind of work by size: a few are captured at the start, the others while the engine serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

import torch

from oaiserve.engine.model.gpu.cuda_capture import Run

log = logging.getLogger(__name__)

Size = TypeVar("Size")  # a number, or several


class SizedGraphs(Generic[Size]):
    """The graphs for `sizes`, ascending, of which those in `first` are captured now.

    Work of a size without a graph takes the next larger one that has one. `capture` makes a graph. The constructor
    raises its errors.
    """

    def __init__(self, sizes: list[Size], first: Collection[Size], capture: Callable[[Size], Run]) -> None:
        self._sizes = sizes
        self._capture = capture
        # The largest is captured first: all others fit into the memory that it has allocated.
        self._graphs = {size: capture(size) for size in reversed(sizes) if size in first}
        self._wanted: list[Size] = []
        self._fails = False

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def find(self, fits: Callable[[Size], bool]) -> tuple[Size, Run] | None:
        """Return the smallest size that fits and has a graph. A smaller one without a graph is captured next."""
        for size in self._sizes:
            if fits(size):
                if graph := self._graphs.get(size):
                    return size, graph
                if not self._wanted:
                    self._wanted.append(size)
        return None

    def capture_next(self, *, only_wanted: bool) -> bool:
        """Capture one more size: one that a step has wanted, or else the largest. Return whether there was one.

        A capture that fails is the last one: steps go on with the graphs that there are.
        """
        if self._fails:
            return False
        missing = [] if only_wanted else [size for size in self._sizes if size not in self._graphs]
        if not (self._wanted or missing):
            return False
        size = (self._wanted or missing)[-1]
        self._wanted.clear()
        try:
            self._graphs[size] = self._capture(size)
        except RuntimeError as error:
            self._fails = True
            torch.cuda.empty_cache()
            log.warning("No more CUDA graphs are captured, because one failed: %s", error.__context__ or error)
        return True

    def forget(self) -> None:
        """Drop all graphs. Those that steps want are captured anew."""
        self._graphs.clear()
