"""Finds the settings of each model of a server: those of the command line, and the model's own in the file.

A model's name is that of its file or folder or its hub id, or NAME in NAME=MODEL. A folder of models stands for all of
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cyclopts import CycloptsError

from oaiserve.checkpoints.hub import gguf_models
from oaiserve.checkpoints.source import find_model
from oaiserve.commands.settings import options_in
from oaiserve.config import Config, EngineOptions, ListenerOptions, OptionError, name_of
from oaiserve.explain.commands import message_of
from oaiserve.plugin import Plugin

_NAMED = re.compile(r"([\w.-]+)=(.+)")
# Settings of the server that clients see. A model cannot have its own.
_OF_THE_SERVER = {field.name for field in fields(ListenerOptions)} | {
    *("api_key", "api_key_file", "guard_all", "cors_origin"),
    *("max_connections", "max_connections_per_address", "header_timeout_seconds", "idle_timeout_seconds"),
}


def models_of(
    arguments: Iterable[str],
    tables: Mapping[str, Mapping[str, Any]],
    base: Config,
    plugins: Iterable[Plugin] = (),
) -> dict[str, Config]:
    """Return the settings of each model by its name, those of the command line first, from which `base` has the rest.
    A model cannot have its own settings of `plugins`.

    Raises OptionError and StartupError.
    """
    named_models: list[tuple[str, str, Mapping[str, Any]]] = []
    for text in arguments:
        named = None if Path(text).exists() else _NAMED.fullmatch(text)
        named_models += [(named[1], named[2], {})] if named else [(name, model, {}) for name, model in _in_folder(text)]
    if not isinstance(tables, Mapping):
        raise OptionError("'models' in the config file must be a table for each model, as in: [models.chat]")
    for name, table in tables.items():
        if not isinstance(table, Mapping) or not isinstance(table.get("model"), str):
            raise OptionError(f'[models.{name}] in the config file needs a model, as in: model = "demo".')
        named_models.append((name, table["model"], {key: value for key, value in table.items() if key != "model"}))
    if base.server.served_model_name and len(named_models) > 1:
        raise OptionError(
            "--served-model-name is for one model. Give names as in NAME=MODEL, and further names of a model by "
            "served-model-name in its table."
        )
    if base.server.served_model_name:
        named_models = [(base.model_name, model, table) for _, model, table in named_models]
    kinds = [kind for plugin in plugins for kind in plugin.options.values()]
    shared = _OF_THE_SERVER | {field.name for kind in kinds for field in fields(kind)}
    configs: dict[str, Config] = {}
    for name, model, table in named_models:
        if foreign := {key.replace("-", "_") for key in table} & shared:
            raise OptionError(f"'{sorted(foreign)[0]}' in [models.{name}] is a setting of the server, for all models.")
        if name in configs:
            raise OptionError(f"Two models have the name '{name}'. Give one another name, as in: {name}-2={model}.")
        if model != "demo":
            find_model(model)
        configs[name] = _of_model(name, model, table, base, is_alone=len(named_models) == 1)
    names = [name for config in configs.values() for name in (*config.accepted_names, *config.engine.adapters)]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise OptionError(f"Two models or adapters have the name '{double}'. Each needs a name of its own.")
    return configs


def holds_models(text: str) -> bool:
    """Return whether an argument is a folder with several models in it, and no model itself."""
    return len(_in_folder(text)) > 1


def _in_folder(text: str) -> list[tuple[str, str]]:
    """Return the names and places of the models that an argument stands for."""
    folder = Path(text)
    # Next to a modules.json, folders are the parts of one model.
    if not text or not folder.is_dir() or any((folder / name).is_file() for name in ("config.json", "modules.json")):
        return [(name_of(text), text)]
    names = {path.name for path in folder.iterdir() if path.suffix == ".gguf" or (path / "config.json").is_file()}
    files = {parts[0]: name.removesuffix(".gguf") for name, parts in gguf_models(names).items()}
    models = files | {name: name for name in names if not name.endswith(".gguf")}
    return [(models[file], str(folder / file)) for file in sorted(models)] or [(name_of(text), text)]


def _of_model(name: str, model: str, table: Mapping[str, Any], base: Config, *, is_alone: bool) -> Config:
    own = _parsed(name, table)
    general = {field.name for field in fields(EngineOptions)} - own["engine"].keys()
    engine = replace(base.engine, **own["engine"], inherited=frozenset(() if is_alone else general))
    names = (name, *own["server"].pop("served_model_name", ()))
    if names == (name_of(model),):  # so that requests may name its path, too
        names = ()
    server = replace(base.server, **own["server"], served_model_name=base.server.served_model_name or names)
    telemetry = replace(base.telemetry, **own["telemetry"])
    if (path := telemetry.record_requests) is not None:
        telemetry = replace(telemetry, record_requests=path.with_stem(f"{path.stem}-{name.replace('/', '-')}"))
    return Config(model, server, engine, telemetry, base.file, base.of_plugins)


def _parsed(name: str, table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values of a model's own settings, by the options that have them. Raises OptionError."""
    names = {key.replace("-", "_") for key in table}
    arguments: list[str] = []
    for key, value in table.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            texts = [json.dumps(value)] if isinstance(value, dict) else value if isinstance(value, list) else [value]
            arguments += [f"--{flag}={each}" for each in texts]
    try:
        options = options_in(arguments)
    except CycloptsError as error:
        raise OptionError(
            f"[models.{name}] in the config file is wrong: {message_of(error, 'oaiserve serve')}"
        ) from error
    return {
        group: {field.name: getattr(each, field.name) for field in fields(each) if field.name in names}
        for group, each in options.items()
        if group != "of_plugins"
    }
