"""The settings of `oaiserve route`, and of a server of several models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from oaiserve.config import (
    Bytes,
    Config,
    ListenerOptions,
    LogFormat,  # noqa: F401 - likewise
    LogLevel,  # noqa: F401 - likewise
    OptionError,
    ServerOptions,
    TelemetryOptions,
    check,
    check_choices,
    check_least,
    is_header_value,
)
from oaiserve.hosts import parse_authority
from oaiserve.plugin import Plugin

ContinueStreams = Literal["any", "alike", "never"]

_URL = re.compile(
    r"https?://((?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?)(?:/[A-Za-z0-9._~/-]*)?"  # with the authority
)
_LABEL = re.compile(r"[^.]{1,63}")  # the only labels that a resolver accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions:
    """Settings of a server with several models, each of which has an engine process."""

    load_on_demand: bool = False
    """Load each model at its first request, instead of all at the start, as far as --memory-budget permits."""

    idle_unload_seconds: float = 0
    """Seconds without a request until a model is unloaded. 0: never."""

    memory_budget: Bytes | None = None
    """Maximum memory of all loaded models with their KV caches. The least recently used one is unloaded to make
    room."""

    def __post_init__(self) -> None:
        seconds = self.idle_unload_seconds
        check(0 <= seconds < float("inf"), "--idle-unload-seconds", seconds, "at least 0, and finite")
        check_least(self, memory_budget=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions(ListenerOptions):
    """Settings of `oaiserve route`, which passes requests on to servers."""

    replica: tuple[str, ...] = ()
    """URL of a server, such as http://10.0.0.5:8000. Repeatable. A name with several addresses adds a server for each.
    A URL with a path is a list of servers in the format of Prometheus' http_sd."""

    replica_key: str | None = field(default=None, repr=False)
    """API key for the servers' reports; requests carry their clients' keys. Set it in the environment, as for
    --api-key."""

    continue_streams: ContinueStreams = "any"
    """Which server continues a stream whose server ends or hangs. any: any of the others. alike: one with the same
    model, settings, CPU and versions, byte for byte. never: none."""

    def __post_init__(self) -> None:
        for url in self.replica:
            check(_is_url(url), "--replica", f"'{url}'", "a URL, as in http://10.0.0.5:8000")
        key = self.replica_key  # the message must not contain it
        check(key is None or is_header_value(key), "--replica-key", "not usable", "printable ASCII without spaces")
        check_choices(self)
        _ = self.config  # This property checks the rest.

    @property
    def config(self) -> Config:
        server = ServerOptions(**{field.name: getattr(self, field.name) for field in fields(ListenerOptions)})
        return Config("gateway", server)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesOptions:
    """Settings of `oaiserve route` in front of other engines than oaiserve."""

    engine: tuple[str, ...] = ()
    """URL of a server of another engine, such as llama.cpp, vLLM, SGLang or Ollama: http://127.0.0.1:8080. Repeatable.
    Replaces --replica. Requests and answers pass byte for byte, with an account of their time."""

    engine_key: str | None = field(default=None, repr=False)
    """API key of the engines, which replaces those of clients. Set it in the environment, as for --api-key."""

    api_key: tuple[str, ...] = field(default=(), repr=False)
    """With --engine: key that clients must send as "Authorization: Bearer KEY". Repeatable. Set it in the environment
    or in a file."""

    api_key_file: tuple[Path, ...] = ()
    """With --engine: file with one key per line: NAME KEY, or only KEY. Repeatable. Changes take effect without a
    restart."""

    stored_keys: bool = False
    """With --engine: require a key that `oaiserve keys` made in the file of --response-store, or one of the others."""

    response_store: Path | None = None
    """With --engine: file with the stored keys, and with batches, which it makes the gateway answer itself."""

    record_requests: Path | None = None
    """With --engine: file that records the load, without any text, for the load test."""

    slo: str | None = None
    """With --engine: targets for the time to first token and per output token, as in ttft:2s,tpot:100ms, for metrics
    and alerts."""

    def __post_init__(self) -> None:
        _ = self.telemetry  # checks its settings
        for url in self.engine:
            check(_is_url(url), "--engine", f"'{url}'", "a URL, as in http://127.0.0.1:8080")
        key = self.engine_key  # the message must not contain it
        check(key is None or is_header_value(key), "--engine-key", "not usable", "printable ASCII without spaces")
        if key is not None and not self.engine:
            raise OptionError("--engine-key is for the servers of --engine, of which there is none.")

    @property
    def telemetry(self) -> TelemetryOptions:
        return TelemetryOptions(record_requests=self.record_requests, slo=self.slo)

    def config_of(self, options: RouteOptions, model: str, plugins: Iterable[Plugin] = ()) -> Config:
        """Return the settings of the gateway as those of a server with these plug-ins."""
        listener = {field.name: getattr(options, field.name) for field in fields(ListenerOptions)}
        server = ServerOptions(**listener, api_key=self.api_key, api_key_file=self.api_key_file)
        of_plugins = []
        for kind in {kind: None for plugin in plugins for kind in plugin.options.values()}:
            # Some settings of plug-ins are settings here, too, by the same names.
            names = [each.name for each in fields(kind) if hasattr(self, each.name)]
            if any(getattr(self, name) for name in names):
                of_plugins.append(kind(**{name: getattr(self, name) for name in names}))
        return Config(model, server, telemetry=self.telemetry, of_plugins=tuple(of_plugins))


def _is_url(text: str) -> bool:
    match = _URL.fullmatch(text)
    host = None if match is None else parse_authority(match[1])
    return host is not None and all(map(_LABEL.fullmatch, host.name.split(".")))
