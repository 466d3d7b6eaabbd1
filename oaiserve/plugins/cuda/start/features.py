"""The faster ways of computing on a GPU, and why some are off."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

from msgspec import Struct, field

from oaiserve.config import EngineOptions
from oaiserve.plugins.cuda.executor.product_ways import UNMEASURED, ProductWays

log = logging.getLogger(__name__)

# Keyed by feature: an empty text, or the reason why it is off.
Verdict = Mapping[str, str]
# Keyed by the names that /metrics uses: the name in the log, and the consequence if the feature is off.
FEATURES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "kernels": ("Triton's kernels", "plain torch computes, which is much slower and has no CUDA graphs"),
        "graphs": ("CUDA graphs", "operations are launched one by one, which is slower (--no-cuda-graph does not try)"),
        "fp8_products": ("Products in FP8", "weights in FP8 are multiplied in 16 bits"),
        "state_chunks": ("States in chunks of tokens", "layers with a state walk through prompts token by token"),
    }
)
# Features that replace kernels by torch. They are on only if a probe finds them correct and faster on this device.
BY_TORCH = ("fp8_products", "state_chunks")


class Probed(Struct, frozen=True):
    """The result of a GPU's probe, with what later starts have added."""

    verdict: Verdict
    ways: ProductWays = UNMEASURED
    # Seconds that multiplying with one matrix of each shape takes, keyed by the way of multiplying and the number of
    # rows.
    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    trial_seconds: float = 0.0  # time to choose ways and features, including the compilation of kernels
    about: str = ""  # the model and the device, by their usual names
    unfit: dict[str, str] = field(default_factory=dict)  # why kernels of PARTS are off, by the name of their part


def all_off(reason: str) -> Verdict:
    """Return the verdict that no feature is usable."""
    return dict.fromkeys(FEATURES, reason)


def by_options(options: EngineOptions) -> Verdict:
    """Return which features the options and the installed packages rule out."""
    if not options.compile:
        return all_off("--no-compile")
    if find_spec("triton") is None:
        return all_off("Triton is not installed")
    return {**dict.fromkeys(FEATURES, ""), "graphs": "" if options.cuda_graph else "--no-cuda-graph"}


def log_off(found: Probed) -> None:
    """Log why features are off.

    There is at most one warning, because graphs need kernels, plus one for each kernel that doesn't fit. Users need not
    act on the others.
    """
    verdict = found.verdict
    failed = [feature for feature, reason in verdict.items() if reason and feature not in BY_TORCH]
    for part, reason in found.unfit.items():
        warn_unfit(part, reason)
    if failed and not found.unfit:
        warn(failed[0], verdict[failed[0]])
    for feature in BY_TORCH:
        if verdict[feature] and not failed:
            log.info("%s: off, and %s: %s", *FEATURES[feature], verdict[feature])


def warn_unfit(part: str, reason: str) -> None:
    log.warning("Triton's kernels for %s: off, and plain torch computes these, which is slower: %s", part, reason)


def warn(feature: str, reason: str) -> None:
    log.warning("%s: off, and %s: %s", *FEATURES[feature], reason)
