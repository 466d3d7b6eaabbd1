"""Kernels and CUDA graphs: how a model starts on a GPU, and how its steps are computed there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts

if TYPE_CHECKING:
    from oaiserve.engine.start.request import Way


def _starts() -> list[Way]:
    from oaiserve.plugins.cuda.way import OnGpu

    return [OnGpu()]


def _findings() -> Iterable[tuple[str, str]]:
    from oaiserve.plugins.cuda.findings import findings

    return findings()


plugin = Plugin(name="cuda", inner=InnerParts(starts=_starts, findings=_findings))
