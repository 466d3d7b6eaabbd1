"""The settings of a replica are those of the command line, as text or with types, and wrong ones are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oaiserve.config import Bytes, OptionError
from oaiserve.scale.on_ray.settings import config_of


def test_texts_and_typed_values_give_the_same_settings() -> None:
    typed: dict[str, Any] = {
        "model": "demo",
        "max_running": 8,
        "prefix_cache": False,
        "kv_cache_memory": "1GiB",
        "chat_template": "chat.jinja",
        "api_key": ["a", "b"],
        "queue_timeout_seconds": 1.5,
        "vllm_metrics": False,
    }
    texts = {name.replace("_", "-"): value if isinstance(value, list) else str(value) for name, value in typed.items()}
    config = config_of(typed)
    assert config == config_of(texts)
    assert (config.model, config.engine.max_running, config.engine.prefix_cache) == ("demo", 8, False)
    assert config.engine.kv_cache_memory == Bytes("1GiB")
    assert config.engine.chat_template == Path("chat.jinja")
    assert config.server.api_key == ("a", "b")
    assert not config.telemetry.vllm_metrics


def test_one_value_is_enough_for_a_setting_that_may_be_repeated() -> None:
    assert config_of({"model": "demo", "api_key": "secret"}).server.api_key == ("secret",)


def test_a_replica_without_a_key_is_not_private() -> None:
    assert not config_of({"model": "demo"}).server.is_private


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "'model' is missing"),
        ({"model": "demo", "port": 80}, "'port' is not a setting of a replica"),
        ({"model": "demo", "max_runing": 4}, "Did you mean 'max_running'?"),
        ({"model": "demo", "max_running": "many"}, "'max_running' is 'many'"),
        ({"model": "demo", "max_running": 0}, "--max-running is 0"),
        ({"model": "demo", "policy": "best"}, "--policy is 'best', but must be one of fair"),
    ],
)
def test_wrong_settings_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("?", r"\?")):
        config_of(args)
