"""The settings of replicas under Ray, which need no Ray."""

from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oaiserve.config import Bytes, OptionError
from oaiserve.plugins.ray.settings import config_of
from oaiserve.wire.report import ReplicaReport, Report

NAME = "10.0.0.5:8000"


def test_texts_and_typed_values_give_the_same_settings() -> None:
    typed: dict[str, Any] = {
        "model": "demo",
        "max_running": 8,
        "prefix_cache": False,
        "kv_cache_memory": "1GiB",
        "chat_template": "chat.jinja",
        "api_key": ["a", "b"],
        "queue_timeout_seconds": 1.5,
        "generation_config": False,
    }
    texts = {name.replace("_", "-"): value if isinstance(value, list) else str(value) for name, value in typed.items()}
    config = config_of(typed)
    assert config == config_of(texts)
    assert (config.model, config.engine.max_running, config.engine.prefix_cache) == ("demo", 8, False)
    assert config.engine.kv_cache_memory == Bytes("1GiB")
    assert config.engine.chat_template == Path("chat.jinja")
    assert config.server.api_key == ("a", "b")
    assert not config.engine.generation_config
    assert config_of({"model": "demo", "api-key": "secret"}).server.api_key == ("secret",)
    assert not config_of({"model": "demo"}).is_private


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "'model' is missing"),
        ({"model": "demo", "port": 80}, "'port' is not a setting of a replica"),
        ({"model": "demo", "max_runing": 4}, "Did you mean --max-running?"),
        ({"model": "demo", "block_size": 4}, "Unknown option 'block-size' in Ray's arguments"),
        ({"model": "demo", "max_running": "many"}, 'unable to convert "many" into int'),
        ({"model": "demo", "max_running": 0}, "--max-running is 0"),
        ({"model": "demo", "policy": "best"}, 'Choose from: "fair"'),
    ],
)
def test_wrong_settings_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("?", r"\?")):
        config_of(args)


def test_a_report_arrives_as_it_was_sent() -> None:
    report = ReplicaReport(NAME, "abc", 7, 2.5, 120.0, array("Q", [1, 2**64 - 1]))
    sent = msgspec.msgpack.encode(Report.of(report, is_ready=True, is_hung=False, models=()))
    assert msgspec.msgpack.decode(sent, type=Report).of_replica(NAME) == report
