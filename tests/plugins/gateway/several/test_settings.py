"""The settings of each of several models: names, tables of the config file, and what a model cannot have for itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oaiserve.config import Config, EngineOptions, OptionError, ServerOptions, TelemetryOptions
from oaiserve.plugin import Plugin
from oaiserve.plugins.gateway.several.settings import holds_models, models_of
from oaiserve.routes.intake.sampling_defaults import given_defaults

BASE = Config(
    "models",
    ServerOptions(host="0.0.0.0", port=9, api_key=("one", "two"), max_connections=8),
    EngineOptions(max_running=5),
    TelemetryOptions(record_requests=Path("load.jsonl")),
)


def test_models_have_the_settings_of_the_command_line_and_their_own() -> None:
    tables = {"third": {"model": "demo", "max-running": 3, "kv-cache-memory": "1GiB", "prefix_cache": False}}
    found = models_of(["demo", "second=demo"], tables, BASE)
    assert [*found] == ["demo", "second", "third"]
    assert [config.engine.max_running for config in found.values()] == [5, 5, 3]
    third = found["third"]
    assert (third.engine.kv_cache_memory, third.engine.prefix_cache) == (2**30, False)
    assert (third.model, third.model_name) == ("demo", "third")
    assert third.telemetry.record_requests == Path("load-third.jsonl"), "each has a recording of its own"
    assert "kv_cache_memory" in found["demo"].engine.inherited - third.engine.inherited
    assert not models_of(["demo"], {}, BASE)["demo"].engine.inherited


def test_a_folder_stands_for_the_models_in_it(tmp_path: Path) -> None:
    for name in ("chat", "embed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    for name in ("small", "mmproj-small", "split-00001-of-00002", "split-00002-of-00002"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    assert holds_models(str(tmp_path))
    assert not holds_models(str(tmp_path / "chat"))
    assert [*models_of([str(tmp_path)], {}, BASE)] == ["chat", "embed", "small", "split"]
    (tmp_path / "modules.json").write_text("[]")
    assert not holds_models(str(tmp_path))


def test_models_from_paths_have_the_names_of_their_files_and_may_be_named_by_their_paths(tmp_path: Path) -> None:
    files = [str(tmp_path / folder / "small.gguf") for folder in ("a", "b")]
    for file in files:
        Path(file).parent.mkdir()
        Path(file).touch()
    found = models_of([files[0], f"second={files[1]}"], {}, BASE)
    assert {name: config.accepted_names for name, config in found.items()} == {
        "small": ("small", files[0]),
        "second": ("second",),
    }
    with pytest.raises(OptionError, match="Two models have the name 'small'. Give one another name, as in: small-2=/"):
        models_of(files, {}, BASE)


def test_one_model_that_is_unloaded_when_idle_has_the_name_that_it_is_given() -> None:
    base = Config("models", ServerOptions(served_model_name=("mine", "other")))
    assert models_of(["demo"], {}, base)["mine"].model_names == ("mine", "other")
    with pytest.raises(OptionError, match="--served-model-name is for one model. Give names as in NAME=MODEL"):
        models_of(["demo", "b=demo"], {}, base)


def test_table_gives_a_model_further_names() -> None:
    found = models_of([], {"a": {"model": "demo", "served-model-name": ["b", "c"]}, "d": {"model": "demo"}}, BASE)
    assert [config.model_names for config in found.values()] == [("a", "b", "c"), ("d",)]
    with pytest.raises(OptionError, match="Two models or adapters have the name 'b'"):
        models_of(["b=demo"], {"a": {"model": "demo", "served-model-name": ["b"]}}, BASE)


@pytest.mark.parametrize(
    ("given", "tables", "said"),
    [
        (["demo", "demo"], {}, "Two models have the name 'demo'. Give one another name, as in: demo-2=demo."),
        ([], {"x": {"modl": "demo"}}, "[models.x] in the config file needs a model"),
        ([], {"x": 3}, "[models.x] in the config file needs a model"),
        ([], 3, "'models' in the config file must be a table for each model"),
        ([], {"x": {"model": "demo", "max-runing": 3}}, "Unknown option --max-runing. Did you mean --max-running?"),
        ([], {"x": {"model": "demo", "block-size": 3}}, "Unknown option --block-size. See 'oaiserve serve --help'."),
        ([], {"x": {"model": "demo", "max-running": "many"}}, 'unable to convert "many" into int'),
        ([], {"x": {"model": "demo", "max-running": 0}}, "--max-running is 0, but must be at least 1."),
        ([], {"x": {"model": "demo", "port": 3}}, "'port' in [models.x] is a setting of the server"),
        (["a=demo"], {"b": {"model": "demo", "lora": ["a=/x"]}}, "Two models or adapters have the name 'a'."),
    ],
)
def test_mistakes_are_told(given: list[str], tables: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as error:
        models_of(given, tables, BASE)
    assert said in str(error.value)


def test_default_params_of_a_model_may_be_a_table() -> None:
    own = models_of([], {"a": {"model": "demo", "default-params": {"top_k": 5}}}, Config("models"))["a"]
    assert given_defaults(own.server.default_params) == {"top_k": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    bow_degrees: int = 15


def test_settings_of_a_plugin_are_for_all_models() -> None:
    base = Config("models", of_plugins=(Manners(bow_degrees=30),))
    plugins = [Plugin(name="polite", options={"Manners": Manners})]
    own = models_of([], {"a": {"model": "demo"}}, base, plugins)["a"]
    assert own.of(Manners) == Manners(bow_degrees=30)
    with pytest.raises(OptionError, match="'bow_degrees' in .models.a. is a setting of the server, for all models"):
        models_of([], {"a": {"model": "demo", "bow-degrees": 45}}, base, plugins)
