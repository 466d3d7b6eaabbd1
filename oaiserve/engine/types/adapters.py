"""Adapters as requests name them. Each has a unique number, so that the prefix cache can distinguish two adapters that
had the same name. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from oaiserve.errors import InvalidRequest, NotFound

MOST_ADAPTERS = 256  # adapters that are loaded at once


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    name: str
    path: str  # the folder's path as the user wrote it
    number: int
    created: int  # Unix seconds, as in the API


class AdapterTable:
    """The adapters by name. Any thread may use it, except where a method says otherwise.

    `add` loads an adapter from a folder and registers it with the model's runner under a number. `drop` removes it from
    there. `adaptable` has the number of rows and columns of each layer that adapters may change. `size` returns the
    bytes that an adapter will take.
    """

    def __init__(
        self,
        add: Callable[[int, str, Path], object] | None = None,
        drop: Callable[[int], object] | None = None,
        adaptable: Mapping[str, tuple[int, int]] | None = None,
        size: Callable[[Path], int] = lambda path: 0,
    ) -> None:
        self.adaptable = adaptable or {}
        self.max_bytes = sys.maxsize
        self._size = size
        self._add = add
        self._drop = drop
        self._lock = Lock()  # One adapter is loaded at a time.
        self._last_number = 0
        self._by_name: dict[str, ServedAdapter] = {}  # never modified, only replaced as a whole
        self._held: dict[int, int] = {}  # bytes of the adapters that the runner has, by number

    @property
    def served(self) -> list[ServedAdapter]:
        return list(self._by_name.values())

    @property
    def num_bytes(self) -> int:
        return sum(list(self._held.values()))  # The list is a copy: the engine thread may drop an adapter meanwhile.

    def get(self, name: str) -> ServedAdapter | None:
        return self._by_name.get(name)

    def load(self, name: str, path: Path, created: int) -> ServedAdapter:
        """Load an adapter, which takes a while. `created` is the time, in Unix seconds. Raises BadAdapter, and
        InvalidRequest for a taken name."""
        with self._lock:
            if name in self._by_name:
                message = f"An adapter '{name}' is loaded already; unload it first, or send \"load_inplace\": true."
                raise InvalidRequest(message, param="lora_name")
            return self._load(name, path, created)

    def replace(self, name: str, path: Path, created: int) -> tuple[ServedAdapter, ServedAdapter | None]:
        """Load an adapter. Return it and the adapter that it replaces, which open requests still use. Raises
        BadAdapter and InvalidRequest."""
        with self._lock:
            replaced = self._by_name.get(name)
            return self._load(name, path, created), replaced

    def _load(self, name: str, path: Path, created: int) -> ServedAdapter:
        assert self._add is not None
        if len(self._by_name.keys() - {name}) >= MOST_ADAPTERS:
            message = f"{MOST_ADAPTERS} adapters are loaded already, which is the most; unload one first."
            raise InvalidRequest(message, param="lora_name")
        num_bytes = self._size(path)
        held_bytes = self.num_bytes
        if held_bytes + num_bytes > self.max_bytes:
            message = (
                f"The adapter takes {num_bytes} bytes, and those that are loaded or in use take {held_bytes} of "
                f"{self.max_bytes} (--lora-memory); unload one first."
            )
            raise InvalidRequest(message, param="lora_path")
        self._last_number += 1
        self._add(self._last_number, name, path)
        adapter = ServedAdapter(name, str(path), self._last_number, created)
        self._held[adapter.number] = num_bytes
        self._by_name = self._by_name | {name: adapter}
        return adapter

    def unload(self, name: str) -> ServedAdapter:
        """Remove the name of an adapter, and return the adapter, which open requests still use. Raises NotFound."""
        with self._lock:
            adapter = self._by_name.get(name)
            if adapter is None:
                raise NotFound(f"No adapter '{name[:200]}' is loaded.", param="lora_name")
            self._by_name = {other: served for other, served in self._by_name.items() if other != name}
            return adapter

    def holds(self, number: int) -> bool:
        """Return whether the runner has the adapter of this number. Engine thread only."""
        return number in self._held

    def drop(self, number: int) -> None:
        """Free an unloaded adapter that no request uses any longer. Engine thread only."""
        assert self._drop is not None
        self._held.pop(number, None)
        self._drop(number)
