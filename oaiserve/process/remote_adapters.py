"""`RemoteAdapters`: the adapters of all engine processes, with the numbers that requests use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from oaiserve.engine.types.adapters import ServedAdapter


class RemoteAdapters:
    """The adapters that each replica has or will have. Only one thread at a time may change them; any may read."""

    def __init__(self, served: Iterable[ServedAdapter]) -> None:
        self._by_name = {adapter.name: adapter for adapter in served}
        self._last_number = max((adapter.number for adapter in self._by_name.values()), default=0)

    @property
    def served(self) -> list[ServedAdapter]:
        return list(self._by_name.values())

    def get(self, name: str) -> ServedAdapter | None:
        return self._by_name.get(name)

    def add(self, adapter: ServedAdapter) -> ServedAdapter:
        """Add an adapter that the processes have loaded, and return it with a number that was never used before."""
        self._last_number += 1
        adapter = replace(adapter, number=self._last_number)
        self._by_name = self._by_name | {adapter.name: adapter}
        return adapter

    def become(self, served: Iterable[ServedAdapter]) -> None:
        """Replace all adapters with these, which have their numbers from another process."""
        self._by_name = {adapter.name: adapter for adapter in served}

    def remove(self, name: str) -> None:
        self._by_name = {other: adapter for other, adapter in self._by_name.items() if other != name}
