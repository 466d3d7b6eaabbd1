"""Decides which faster ways to compute are used on a GPU: those whose trial shows no problem."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, TypeVar

from oaiserve.engine.start.gpu.verdict import Verdict
from oaiserve.errors import StartupError
from oaiserve.files.load_errors import named

log = logging.getLogger(__name__)

T = TypeVar("T")
# The names under which /metrics says what is on.
Feature = Literal["kernels", "long_prompts", "sampling", "adapters", "graphs"]
_PLAIN = "plain torch computes it, which is much slower and has no CUDA graphs"
# For each feature: its name in the log, and the consequence if it is off.
FEATURES: Mapping[Feature, tuple[str, str]] = MappingProxyType(
    {
        "kernels": ("Triton's kernels", _PLAIN),
        "long_prompts": ("Long prompts by FlashAttention", "Triton's kernels compute them"),
        "sampling": ("Sampling by Triton's kernels", _PLAIN),
        "adapters": ("Adapters by Triton's kernels", "plain torch adds them, which is slower"),
        "graphs": ("CUDA graphs", "operations are launched one by one, which is slower (--no-cuda-graph does not try)"),
    }
)


class TrialFailed(Exception):
    """A trial in a probe raised an error, which the message names. Later trials could fail because of this one."""


class Trials:
    """The features of one start: which of them are on, and why the others are off.

    Features in the verdict are not tried again. In a probe, `report` is called with the name of a feature before its
    trial, and with None after it.
    """

    def __init__(
        self,
        verdict: Verdict = Verdict(),  # noqa: B008 - immutable
        report: Callable[[Feature | None], object] | None = None,
    ) -> None:
        self.off: dict[str, str] = dict.fromkeys(FEATURES, "not tried")
        self._verdict = verdict
        self._problems: set[str] = set()
        self._report = report

    @property
    def verdict(self) -> Verdict:
        return Verdict(dict(self.off), frozenset(self._problems))

    def is_usable(self, feature: Feature, problem: Callable[[], object | None]) -> bool:
        """Return whether a feature is used: the verdict says so, or `problem` returns None. Other results are logged.

        Raises TrialFailed, and StartupError for the user.
        """
        return self.tried(feature, lambda: True, lambda _: problem()) is not None

    def tried(self, feature: Feature, make: Callable[[], T], problem: Callable[[T], object | None]) -> T | None:
        """Make a faster way to compute, and return it if `is_usable` says so."""
        reason = self._verdict.off.get(feature)
        is_problem = feature in self._verdict.problems
        made: T | None = None
        if not reason:
            with self.blamed_on(feature):
                try:
                    made = make()
                    found = problem(made) if reason is None else None
                    reason = "" if found is None else str(found)
                except StartupError:  # An option of the user is impossible.
                    raise
                except Exception as error:  # Compilers and drivers can raise anything, and the feature is optional.
                    reason = named(error)
                    if self._report is not None:
                        raise TrialFailed(reason) from error
            is_problem = bool(reason)
        self.off[feature] = reason
        if is_problem:
            self._problems.add(feature)
            name, instead = FEATURES[feature]
            log.warning("%s: off, and %s: %s", name, instead, reason)
        return None if reason else made

    @contextmanager
    def blamed_on(self, feature: Feature) -> Iterator[None]:
        """Report the block as a trial of a feature, or as work that needs it, unless the feature is off."""
        if self._report is None or self.off[feature] not in ("", "not tried"):
            yield
            return
        self._report(feature)
        yield
        self._report(None)
