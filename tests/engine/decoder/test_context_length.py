"""The longest sequence of a model is that of its class, for every type and every kind of rotary embeddings."""

from typing import Any

import pytest

from oaiserve.engine.decoder.context_length import context_length
from oaiserve.engine.decoder.settings import settings_of
from oaiserve.engine.model import model_config
from tests.engine.decoder.rotary_modules import ORIGINAL_KEY, ROTATING, SHORT, config_with, kinds_of
from tests.engine.decoder.test_settings import ROWS, of_class


def lengths(config: dict[str, Any]) -> tuple[int, int]:
    of_type = of_class(config)
    of_type.attention_chunk_size = None  # It limits the length only without a description.
    return context_length(settings_of(config)), model_config.context_length(of_type)


@pytest.mark.parametrize("name", ROWS)
def test_a_type_without_further_keys_has_the_length_of_its_class(name: str) -> None:
    actual, expected = lengths({"model_type": name})
    assert actual == expected


@pytest.mark.parametrize("name", ROTATING)
def test_the_kind_of_rotary_embeddings_limits_the_length(name: str) -> None:
    for kind in kinds_of(name):
        for original in ({}, {ORIGINAL_KEY: SHORT}):
            actual, expected = lengths(config_with(name, kind, **original))
            assert actual == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"max_position_embeddings": 500}, 500),
        ({"max_position_embeddings": 2**21}, 2**20),
        ({"max_position_embeddings": 0, "max_seq_len": 300}, 300),
        ({"max_position_embeddings": 0}, 2048),
    ],
)
def test_other_keys_limit_the_length(keys: dict[str, Any], expected: int) -> None:
    assert lengths({"model_type": "llama", **keys}) == (expected, expected)


def test_chunks_of_attention_limit_the_length_of_models_without_a_description() -> None:
    config = {"model_type": "llama4_text", "max_position_embeddings": 500, "attention_chunk_size": 100}
    assert context_length(settings_of(config)) == 500
    assert model_config.context_length(of_class(config)) == 99
