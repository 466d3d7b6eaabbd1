"""The commands `oaiserve keys add`, `list`, `limit` and `revoke`, which work on the file of --response-store.

A running server with --stored-keys notices each change within about a second.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from oaiserve.commands.table import table
from oaiserve.errors import StartupError
from oaiserve.explain.commands import settings_in
from oaiserve.http.key_table import KeyTable
from oaiserve.http.keys import Limits


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreFile:
    """The file that has the keys, as the server's settings name it."""

    response_store: Annotated[Path | None, Parameter(env_var="OAISERVE_RESPONSE_STORE")] = None
    """The file of --response-store of the server. It is created if it is missing."""

    config: Path | None = None
    """The config file of the server, to read that setting from."""

    def opened(self) -> KeyTable:
        path = self.response_store
        if path is None and self.config is not None:
            given = settings_in(self.config)
            path = given.get("response-store", given.get("response_store"))
        if path is None:
            raise StartupError("Give the file of the keys by --response-store, or the server's settings by --config.")
        return KeyTable(Path(path))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """What a key may do."""

    role: Literal["use", "watch", "admin"] | None = None
    """use: ask the model. watch: see metrics, the live page and /debug. admin: both, load adapters, and see all keys.
    Default: use."""

    requests_per_minute: int | None = None
    """Most requests in any 60 seconds. 0, here and below: no limit, which is the default."""

    tokens_per_minute: int | None = None
    """Most tokens of prompts and answers in any 60 seconds."""

    requests_per_day: int | None = None
    """Most requests from midnight to midnight, UTC."""

    tokens_per_day: int | None = None
    """Most tokens in the same time."""

    cost_per_day: float | None = None
    """Most seconds of cores in the same time, as far as they were spent on its requests."""

    priority: int | None = None
    """Priority of requests that name none, under --policy priority. Others get no better (lower) one."""

    model: tuple[str, ...] = ()
    """Name of a model or adapter that the key may ask for. May be repeated. Default, and *: all."""

    @property
    def values(self) -> dict[str, Any]:
        limits = {name: getattr(self, name) for name in Limits._fields}
        return {**limits, "role": self.role, "priority": self.priority, "models": [*self.model] or None}


def add(name: str, /, *, options: KeyOptions = KeyOptions(), file: StoreFile = StoreFile()) -> int:
    """Make a key and print it, which nothing does again: the file has its digest only.

    Parameters
    ----------
    name
        Whose key it is, as logs show it.
    """
    key = file.opened().add(name, options.values)
    print(f"The key '{name}' is made. Keep it, it is shown this once:", file=sys.stderr)
    print(key)
    return 0


def limit(name: str, /, *, options: KeyOptions = KeyOptions(), file: StoreFile = StoreFile()) -> int:
    """Change what a key may do, as far as flags say. The rest stays."""
    file.opened().change(name, options.values)
    return 0


def revoke(name: str, /, *, file: StoreFile = StoreFile()) -> int:
    """End a key for ever. Answers under way still end."""
    file.opened().revoke(name)
    return 0


def list_(*, file: StoreFile = StoreFile()) -> int:
    """List all keys, the valid ones first, with what they have used today (UTC)."""
    rows = []
    for key in file.opened().listed():
        limits = ", ".join(_limit(name, key[name]) for name in Limits._fields if key[name] is not None)
        used = f"{key['requests_today']} requests, {key['tokens_today']} tokens, cost {key['cost_today']:.3g}"
        state = "revoked" if key["revoked"] else key["role"]
        rows.append(
            (key["name"], state, limits or "-", ", ".join(key["models"]) or "all", used, _time(key["last_used"]))
        )
    print(table(("NAME", "ROLE", "LIMITS", "MODELS", "USED TODAY", "LAST USED"), rows))
    return 0


def _limit(name: str, value: float) -> str:
    unit, _, per = name.partition("_per_")
    return f"{value:g} {unit}/{per}"


def _time(unix_seconds: float | None) -> str:
    return "never" if unix_seconds is None else f"{datetime.fromtimestamp(unix_seconds):%Y-%m-%d %H:%M}"


COMMANDS = (add, list_, limit, revoke)
