"""A setting that transformers refuses is named in a sentence, with its value and what it must be."""

from typing import Any

import pytest
from transformers import LlamaConfig

from oaiserve.checkpoints.wrong_settings import wrong_setting


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32', but must be an integer"),
        ({"hidden_size": None}, "hidden_size is null, but must be an integer"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', but must be a number with a decimal point"),
        ({"use_cache": 1}, "use_cache is 1, but must be true or false"),
        ({"hidden_act": ["silu"]}, "hidden_act is ['silu'], but must be a text"),
        ({"head_dim": True}, "head_dim is true, but must be an integer or null"),
        ({"eos_token_id": "2"}, "eos_token_id is '2', but must be an integer or a list of integers or null"),
        ({"rope_parameters": 5}, "rope_parameters is 5, but must be an object or null"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match="Validation error") as caught:
        LlamaConfig(**settings)
    assert wrong_setting(caught.value) == f"the model's setting {says}"


def test_settings_that_contradict_each_other_are_named() -> None:
    with pytest.raises(Exception, match="Class validation error") as caught:
        LlamaConfig(hidden_size=64, num_attention_heads=5)
    says = "the model's settings don't fit together (The hidden size (64) is not a multiple of the number of attention"
    assert str(wrong_setting(caught.value)).startswith(says)


def test_another_error_says_nothing_about_settings() -> None:
    assert wrong_setting(ValueError("Validation error for field 'x': it is short")) is None
