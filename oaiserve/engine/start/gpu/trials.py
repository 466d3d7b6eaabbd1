"""Decides which faster ways to compute are used on a GPU: those that were tried, and showed no problem.

A trial that ends the process, or loses the device, is remembered in a file. The next start leaves it out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, TypeVar

from oaiserve.engine.start.gpu.trial_marker import TrialMarker
from oaiserve.errors import DeviceLost, StartupError
from oaiserve.files.load_errors import named

log = logging.getLogger(__name__)

T = TypeVar("T")
# The names under which /metrics says what is on.
Feature = Literal[
    "attention",
    "long_prompts",
    "sampling",
    "packed_weights",
    "packed_experts",
    "fused_layers",
    "adapters",
    "decode_graphs",
    "prompt_graphs",
    "mixed_graphs",
]
_ONE_BY_ONE = "their operations are launched one by one, which is slower (--no-cuda-graph does not try)"
_PLAIN = "plain torch computes it, which is much slower and has no CUDA graphs"
# What each one is called, and what computes where it is off.
FEATURES: Mapping[Feature, tuple[str, str]] = MappingProxyType(
    {
        "attention": ("Attention by Triton's kernels", _PLAIN),
        "long_prompts": ("Long prompts by FlashAttention", "Triton's kernels compute them"),
        "sampling": ("Sampling by Triton's kernels", _PLAIN),
        "packed_weights": ("Products with packed weights", "each one expands its matrix, which is much slower"),
        "packed_experts": ("Experts by kernels", "plain torch computes them one by one, which is much slower"),
        "fused_layers": ("Fused layers", "plain torch runs operation by operation"),
        "adapters": ("Adapters by Triton's kernels", "plain torch adds them, which is slower"),
        "decode_graphs": ("CUDA graphs of decodes", _ONE_BY_ONE),
        "prompt_graphs": ("CUDA graphs of prompts", _ONE_BY_ONE),
        "mixed_graphs": ("CUDA graphs of both", "decodes and prompts are two forwards, which read the weights twice"),
    }
)


class Trials:
    """The trials of one start: which features are on, and why the others are off.

    `off` has the reason by feature, an empty text for one that is on. `synchronize` raises where the device is lost.
    """

    def __init__(self, marker: TrialMarker | None = None, synchronize: Callable[[], object] = lambda: None) -> None:
        self.off: dict[str, str] = dict.fromkeys(FEATURES, "not tried")
        self._marker = marker or TrialMarker(None)
        self._synchronize = synchronize

    def is_usable(self, feature: Feature, problem: Callable[[], object | None]) -> bool:
        """Decide whether a feature is used: only if `problem` finds none. Its finding, or its error, is logged.

        Raises DeviceLost, and what is for the user: StartupError.
        """
        if day := self._marker.died.get(feature):
            found: object | None = f"a start on {day} ended in it (--recheck tries it again)"
        else:
            with self._marker.trying(feature):
                try:
                    found = problem()
                except StartupError:  # what was asked for is not possible
                    raise
                except Exception as error:  # a compiler or a driver can raise anything, and the server runs without it
                    found = named(error)
                    self._refuse_a_lost_device(feature, found)
        self.off[feature] = "" if found is None else str(found)
        if found is not None:
            name, instead = FEATURES[feature]
            log.warning("%s: off, and %s: %s", name, instead, found)
        return found is None

    def tried(self, feature: Feature, make: Callable[[], T], problem: Callable[[T], object | None]) -> T | None:
        """Make a faster way to compute, and return it if it is usable as `is_usable` says."""
        made: list[T] = []

        def make_and_look() -> object | None:
            made.append(make())
            return problem(made[0])

        return made[0] if self.is_usable(feature, make_and_look) else None

    @contextmanager
    def blamed_on(self, feature: Feature) -> Iterator[None]:
        """Run work in the block that is no trial of its own. If it ends the process or loses the device, the feature is
        off at the next start.

        Raises DeviceLost then, and the error of the work otherwise.
        """
        if self.off[feature]:
            yield
            return
        with self._marker.trying(feature):
            try:
                yield
            except StartupError:
                raise
            except Exception as error:
                self._refuse_a_lost_device(feature, named(error))
                raise

    def _refuse_a_lost_device(self, feature: Feature, found: object) -> None:
        try:
            self._synchronize()
        except Exception as error:
            is_kept = self._marker.keep()
            raise (DeviceLost if is_kept else StartupError)(
                f"The GPU failed, and fails from now on: {FEATURES[feature][0]}: {found}."
            ) from error
