"""Configurations of small models by transformers' model type, in sizes that the native step takes."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from oaiserve.engine.decoder.families import FAMILIES
from tests.models.decoders import SMALL
from tests.models.small_sizes import OF_TYPE

_SIZES = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # sizes that the native step takes
STATE_FAMILIES = [name for name, family in FAMILIES.items() if family.mixer is not None]


def sizes_of(name: str) -> dict[str, Any]:
    """Return the sizes of a small model of a type; None for one that its configuration must not have."""
    return {**_SIZES, **OF_TYPE.get(name, {})}


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    """Return the configuration of a small model of a type."""
    sizes = {key: value for key, value in (sizes_of(name) | changes).items() if value is not None}
    result: PreTrainedConfig = AutoConfig.for_model(name, **sizes)
    return result
