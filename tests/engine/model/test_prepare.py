"""A loaded model is switched to paged attention, if it computes the same with it. Its limits are those of its files."""

from __future__ import annotations

import pytest
from transformers import AttentionInterface, AutoConfig, LlamaConfig, PreTrainedConfig, RwkvConfig

from oaiserve.engine.model.attention.hook import paged_attention
from oaiserve.engine.model.prepare import prepare
from oaiserve.errors import StartupError
from tools.random_models import FAMILIES, SMALL, foreign_config, random_model


@pytest.mark.parametrize(
    "config",
    [
        RwkvConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2),
        AutoConfig.for_model("minimax", **SMALL, num_local_experts=2),
        AutoConfig.for_model("diffllama", **SMALL),  # which calls attention twice, with the halves of its values
    ],
    ids=["rwkv", "minimax", "diffllama"],
)
def test_a_model_that_does_not_use_the_attention_interface_is_refused(config: PreTrainedConfig) -> None:
    with pytest.raises(StartupError, match=r"^'the model' cannot be served: "):
        prepare(random_model(config))


def test_a_model_with_attention_that_no_backend_supports_is_refused_for_its_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is gpt-oss without its sinks, of which the attention function is not told."""
    monkeypatch.setattr("oaiserve.engine.model.prepare.ATTENTION", "without_sinks")
    AttentionInterface.register("without_sinks", lambda *args, s_aux, **kwargs: paged_attention(*args, **kwargs))
    with pytest.raises(StartupError, match="its outputs differ by"):
        prepare(random_model(foreign_config("gpt_oss")))


def test_limits_come_from_the_config() -> None:
    loaded = prepare(random_model(FAMILIES["llama"]))
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (97, 128, frozenset([2]))
    assert loaded.kv_bytes_per_token == 3 * 2 * (8 + 8) * 4


def test_rope_that_depends_on_the_batch_limits_max_model_len() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    config = LlamaConfig(**{**SMALL, "rope_parameters": rope})
    assert prepare(random_model(config)).max_model_len == 32
