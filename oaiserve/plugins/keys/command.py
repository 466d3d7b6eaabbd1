"""The commands `oaiserve keys add`, `list`, `limit` and `revoke`, which work on the file of --response-store.

A running server with --stored-keys notices each change within about a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from oaiserve.commands.table import table
from oaiserve.errors import StartupError
from oaiserve.explain.commands import settings_in
from oaiserve.plugins.keys.key_table import KeyTable, Limits


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreFile:
    """The file with the keys, from the server's settings."""

    response_store: Annotated[Path | None, Parameter(env_var="OAISERVE_RESPONSE_STORE")] = None
    """The server's file of --response-store. It is created if it is missing."""

    config: Path | None = None
    """The server's config file, which may name that file."""

    @contextmanager
    def opened(self) -> Iterator[KeyTable]:
        settings = {} if self.config is None else settings_in(self.config)
        path = self.response_store or settings.get("response-store", settings.get("response_store"))
        if path is None:
            raise StartupError("Give the file of the keys by --response-store, or the server's settings by --config.")
        with closing(KeyTable(Path(str(path)))) as keys:
            yield keys


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """The columns of a key that flags set. None leaves a column unchanged."""

    role: Literal["use", "watch", "admin"] | None = None
    """use: send requests. watch: see metrics, the live page and /debug. admin: both, load adapters, and see all keys.
    Default: use."""

    requests_per_minute: int | None = None
    """Most requests in any 60 seconds. Here and below, 0 means no limit, which is the default."""

    tokens_per_minute: int | None = None
    """Most tokens of prompts and answers in any 60 seconds."""

    requests_per_day: int | None = None
    """Most requests from midnight to midnight, UTC."""

    tokens_per_day: int | None = None
    """Most tokens of prompts and answers from midnight to midnight, UTC."""

    cost_per_day: float | None = None
    """Highest cost from midnight to midnight, UTC: in the unit of --cost-per-hour, or else in core-seconds."""

    priority: int | None = None
    """Priority of requests that name none, under --policy priority. Others get no better (lower) one."""

    share: float | None = None
    """Share of the tokens under --policy fair, relative to that of other clients, which is 1 unless it is set. Default:
    --default-share of the server."""

    models: Annotated[tuple[str, ...] | None, Parameter(name="--model")] = None
    """Name of a model or adapter that the key may use. May be repeated. Default, and *: all."""


NO_OPTIONS = KeyOptions()
BY_SETTINGS = StoreFile()


def add(name: str, /, *, options: KeyOptions = NO_OPTIONS, file: StoreFile = BY_SETTINGS) -> None:
    """Create a key and print it once. The file keeps only its digest.

    Parameters
    ----------
    name
        The name of the key's owner, which logs show.
    """
    with file.opened() as keys:
        key = keys.add(name, asdict(options))
    print(f"Created the key '{name}'. Copy it now, because it is not shown again:", file=sys.stderr)
    print(key)


def limit(name: str, /, *, options: KeyOptions = NO_OPTIONS, file: StoreFile = BY_SETTINGS) -> None:
    """Change what a key may do. What no flag names stays as it is."""
    with file.opened() as keys:
        keys.change(name, asdict(options))


def revoke(name: str, /, *, file: StoreFile = BY_SETTINGS) -> None:
    """Revoke a key for good. Answers in progress are completed."""
    with file.opened() as keys:
        keys.revoke(name)


def list_(*, file: StoreFile = BY_SETTINGS) -> None:
    """List all keys, the valid ones first, with what each has used today (UTC)."""
    with file.opened() as keys:
        rows = [_row(**key) for key in keys.listed()]
    if not rows:
        print("There are no keys yet. To create one: oaiserve keys add NAME")
        return
    print(table(("NAME", "ROLE", "LIMITS", "MODELS", "USED TODAY", "LAST USED"), rows))


def _row(
    name: str, role: str, models: list[str], revoked: float | None, last_used: float | None, **more: Any
) -> list[str]:
    limits = [f"{more[of]:,} {of.replace('_per_', '/')}" for of in Limits._fields if more[of] is not None]
    if more["share"] is not None:
        limits.append(f"share {more['share']:g}")
    cost = more["cost_today"]
    shown_cost = f"{cost:,.2f}" if cost >= 1 else f"{cost:.3g}"
    used = f"{more['requests_today']:,} requests, {more['tokens_today']:,} tokens, cost {shown_cost}"
    if last_used is None:
        last = "never"
    else:
        last = f"{datetime.fromtimestamp(last_used):%Y-%m-%d %H:%M}"
    return [name, "revoked" if revoked else role, ", ".join(limits) or "-", ", ".join(models) or "all", used, last]


COMMANDS = (add, list_, limit, revoke)
