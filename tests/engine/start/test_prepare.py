"""A loaded model is switched to paged attention, if it computes the same with it. Its limits are those of its files."""

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, LlamaConfig, PreTrainedConfig, RwkvConfig

from oaiserve.engine.model.attention import LayerCache, Scoring
from oaiserve.engine.model.attention.hook import paged_attention
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.start.prepare import prepare
from oaiserve.errors import StartupError
from tests.engine.model.cpu.small_models import make_model
from tests.models.decoders import FAMILIES, SMALL, foreign_config, random_model
from tests.models.small_configs import config_of


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
    monkeypatch.setattr("oaiserve.engine.start.prepare.ATTENTION", "without_sinks")
    AttentionInterface.register("without_sinks", lambda *args, s_aux, **kwargs: paged_attention(*args, **kwargs))
    with pytest.raises(StartupError, match="its outputs differ by"):
        prepare(random_model(foreign_config("gpt_oss")))


DEEP = config_of(
    "gemma3n_text",
    num_hidden_layers=30,
    layer_types=["sliding_attention", "full_attention"] * 15,
    num_kv_shared_layers=10,
    altup_num_inputs=4,
    activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20,
)


@pytest.mark.parametrize("wrong", ["nothing", "the window", "the order of heads"])
def test_a_model_that_makes_much_of_rounding_is_refused_only_for_what_is_wrong(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits, the logits of its own attention and of ours differ by more than half of their norm."""

    class Attention(ReferenceAttention):
        def __call__(self, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, scoring: Scoring) -> Tensor:
            if wrong == "the window":
                scoring = scoring._replace(sliding_window=None)
            if wrong == "the order of heads":
                return super().__call__(query.flip(1), key, value, cache, scoring).flip(1)
            return super().__call__(query, key, value, cache, scoring)

    monkeypatch.setattr("oaiserve.engine.start.prepare.ReferenceAttention", Attention)
    model = make_model(DEEP, dtype=torch.bfloat16)
    if wrong == "nothing":
        assert len(prepare(model).kv_shapes) == 20
    else:
        with pytest.raises(StartupError, match=r"differ by .* in 'model\.layers\.0\.self_attn' from its own"):
            prepare(model)


def test_a_layer_whose_attention_gives_zeros_is_not_refused() -> None:
    model = random_model(FAMILIES["llama"], dtype=torch.bfloat16)
    model.base_model.layers[1].self_attn.o_proj.weight.data.zero_()  # as in layers that are added before a training
    prepare(model)


def test_limits_come_from_the_config() -> None:
    loaded = prepare(random_model(FAMILIES["llama"]))
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (97, 128, frozenset([2]))
    assert loaded.kv_bytes_per_token == 3 * 2 * (8 + 8) * 4


def test_rope_that_depends_on_the_batch_limits_max_model_len() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    config = LlamaConfig(**{**SMALL, "rope_parameters": rope})
    assert prepare(random_model(config)).max_model_len == 32
