"""Graphs of one kind of work by size: a few are captured at the start, the others while the engine serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.gpu.cuda_capture import Run

if TYPE_CHECKING:  # which needs Triton
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

log = logging.getLogger(__name__)

Size = TypeVar("Size")  # a number, or several


class SizedGraphs(Generic[Size]):
    """The graphs for `sizes`, ascending, of which those in `first` are captured now.

    Work of a size without a graph takes the next larger one that has one. `capture` makes the graph of a size, with the
    `adapters` if it is given them. The constructor raises its errors. Other graphs are captured when they are needed,
    or ahead of that where there is time, but for those with adapters.
    """

    def __init__(
        self,
        sizes: list[Size],
        first: Collection[Size],
        capture: Callable[[Size, TritonAdapters | None], Run],
        adapters: TritonAdapters | None = None,
    ) -> None:
        self._sizes = sizes
        self._capture = capture
        self._adapters = adapters
        # By the size, and whether it is one with adapters. The largest is captured first: all others fit into the
        # memory that it has allocated.
        self._graphs = {(size, False): capture(size, None) for size in reversed(sizes) if size in first}
        self._wanted: tuple[Size, bool] | None = None
        self._fails = False
        if adapters is not None:
            adapters.drop_captured.append(self._drop_adapted)

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def find(self, fits: Callable[[Size], bool], adapters: Sequence[Adapter | None] = ()) -> tuple[Size, Run] | None:
        """Return the smallest size that fits and has a graph. A smaller one without a graph is captured next."""
        is_adapted = any(adapters)
        if is_adapted and (self._adapters is None or not self._adapters.admit(adapters)):
            return None
        for size in self._sizes:
            if fits(size):
                if graph := self._graphs.get((size, is_adapted)):
                    return size, graph
                self._wanted = self._wanted or (size, is_adapted)
        return None

    def capture_next(self, *, only_wanted: bool = False) -> bool:
        """Capture one more size: one that a step has wanted, or else the largest. Return whether there was one.

        A capture that fails is the last one: steps go on with the graphs that there are.
        """
        if self._fails:
            return False
        size, is_adapted = self._wanted or (None, False)
        if size is None and not only_wanted:
            size = next((size for size in reversed(self._sizes) if (size, False) not in self._graphs), None)
        if size is None:
            return False
        self._wanted = None
        try:
            self._graphs[size, is_adapted] = self._capture(size, self._adapters if is_adapted else None)
        except RuntimeError as error:
            self._fails = True
            torch.cuda.empty_cache()
            log.warning("No more CUDA graphs are captured, because one failed: %s", error.__context__ or error)
        return True

    def _drop_adapted(self) -> None:
        """Drop the graphs with adapters. Those that steps want are captured anew."""
        self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1]}
