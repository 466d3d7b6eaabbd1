"""`RemoteAdapters`: the adapters that an engine process has, by the numbers of the first process that had them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from oaiserve.engine.adapters import ServedAdapter


class RemoteAdapters:
    """The adapters of the engine process. One thread at a time changes them; any may read."""

    def __init__(self, served: Iterable[ServedAdapter]) -> None:
        self._by_name = {adapter.name: adapter for adapter in served}
        self._numbers = {adapter.number: adapter.number for adapter in self._by_name.values()}

    @property
    def served(self) -> list[ServedAdapter]:
        return list(self._by_name.values())

    def get(self, name: str) -> ServedAdapter | None:
        return self._by_name.get(name)

    def number_of(self, number: int) -> int | None:
        """Return the number that the present process has for an adapter, or None if it lacks it."""
        return self._numbers.get(number)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Take the numbers of another process, by their first ones."""
        self._numbers = dict(numbers)

    def add(self, adapter: ServedAdapter) -> ServedAdapter:
        """Add an adapter that the process has loaded, and return it with a number that no other one has here."""
        number = adapter.number
        if number in self._numbers:  # A process that was started again counts from the beginning.
            adapter = replace(adapter, number=1 + max(self._numbers))
        self._numbers[adapter.number] = number
        self._by_name = self._by_name | {adapter.name: adapter}
        return adapter

    def remove(self, name: str) -> None:
        self._by_name = {other: adapter for other, adapter in self._by_name.items() if other != name}
