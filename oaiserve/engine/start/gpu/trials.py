"""Decides which faster ways to compute are used on a GPU: those whose trial shows no problem."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, TypeVar

from oaiserve.files.load_errors import named

log = logging.getLogger(__name__)

T = TypeVar("T")
# The results of trials by feature: an empty text, or the reason why it is off. Other features were not tried.
Verdict = Mapping[str, str]
Feature = Literal["kernels", "graphs"]  # the names under which /metrics says what is on
# For each feature: its name in the log, and the consequence if it is off.
FEATURES: Mapping[Feature, tuple[str, str]] = MappingProxyType(
    {
        "kernels": ("Triton's kernels", "plain torch computes, which is much slower and has no CUDA graphs"),
        "graphs": ("CUDA graphs", "operations are launched one by one, which is slower (--no-cuda-graph does not try)"),
    }
)


def all_off(reason: str) -> Verdict:
    """Return the verdict that no feature is usable."""
    return dict.fromkeys(FEATURES, reason)


class Trials:
    """The features of one start: `off` says why each is off, and is empty for one that is on.

    Features in the verdict of a probe are not tried again. In a probe, `report` is called with the name of a feature
    before its trial, and with None after it.
    """

    def __init__(
        self, verdict: Verdict | None = None, report: Callable[[Feature | None], object] | None = None
    ) -> None:
        self.off: dict[str, str] = dict.fromkeys(FEATURES, "not tried")
        self.results: dict[str, str] = {}
        self._verdict = verdict or {}
        self._report = report

    def tried(self, feature: Feature, make: Callable[[], T], problem: Callable[[T], object | None]) -> T | None:
        """Make a faster way to compute, and return it if the verdict, or else `problem`, finds nothing.

        In a probe, errors end it, because later trials could fail by what this one left.
        """
        reason = self._verdict.get(feature)
        made: T | None = None
        if not reason:
            with self.blamed_on(feature):
                try:
                    made = make()
                    if reason is None:
                        reason = str(problem(made) or "")
                except Exception as error:  # Compilers and drivers can raise anything, and the feature is optional.
                    if self._report is not None:
                        raise
                    reason = named(error)
        self.off[feature] = self.results[feature] = reason
        if reason:
            log.warning("%s: off, and %s: %s", *FEATURES[feature], reason)
            return None
        return made

    @contextmanager
    def blamed_on(self, feature: Feature) -> Iterator[None]:
        """Report the block as a trial of a feature, or as work that needs it, unless the feature is off."""
        if self._report is None or self.off[feature] not in ("", "not tried"):
            yield
            return
        self._report(feature)
        yield
        self._report(None)
