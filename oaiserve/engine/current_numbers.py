"""The engine's numbers at this moment: those that its thread has published, plus what has changed since. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from oaiserve.engine.types.adapters import ServedAdapter
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.step_record import HostPart


def current_numbers(
    published: EngineNumbers,
    adapters: Iterable[ServedAdapter],
    *,
    now_ns: int,
    cores_ns: int,
    explains: bool,
    num_tokenizing: int,
    num_hangs: int,
) -> EngineNumbers:
    """Return the numbers at `now_ns`. The clock must be read before `published`, so that no later call returns less.

    `cores_ns` is the CPU time of the engine's process at `now_ns`. If the engine `explains` its time, the time and CPU
    time without work belong to no request."""
    host_ns = dict(published.host_ns)
    idle_ns = 0
    idle_core_ns = 0
    if published.idle_since_ns is not None:
        idle_ns = max(0, now_ns - published.idle_since_ns)
        host_ns[HostPart.IDLE] += idle_ns
        idle_core_ns = max(0, cores_ns - published.core_ns)
    if not explains:
        idle_ns = 0
        idle_core_ns = 0
    return replace(
        published,
        num_tokenizing=num_tokenizing,
        num_hangs=num_hangs,
        adapters={adapter.name: published.by_adapter.get(adapter.number, (0, 0)) for adapter in adapters},
        host_ns=host_ns,
        core_ns=published.core_ns + idle_core_ns,
        nobody_core_ns=published.nobody_core_ns + idle_core_ns,
        nobody_machine_ns=published.nobody_machine_ns + idle_ns,
    )
