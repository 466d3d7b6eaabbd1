"""The description of a model is read from its modules, and refused if it is not complete or contradicts itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.description import AttentionParameters, Decoder, NotKnown
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.check import may_round_more
from tests.engine.model.cpu.small_models import FAMILIES, load

NO_WINDOW = AttentionParameters(scaling=0.25, sliding_window=None, softcap=None)


def described(loaded: LoadedModel) -> Decoder:
    return describe(loaded, dict.fromkeys(loaded.kv_shapes, NO_WINDOW))


@pytest.fixture
def llama() -> LoadedModel:
    return load(FAMILIES["llama"])


def test_layers_with_the_same_rotary_embedding_share_one_table(llama: LoadedModel) -> None:
    """A table has a row for each position of the model, so a table for each layer could fill the memory."""
    tables = [layer.attention.rotary for layer in described(llama).layers]
    assert tables[0].cosines.shape == (128, 8)
    assert tables[0] is tables[1] is tables[2]
    first, second, third = (layer.attention.rotary for layer in described(load(FAMILIES["gemma3_text"])).layers)
    assert first is third is not second


def test_a_parameter_that_the_description_misses_is_named_in_the_error(llama: LoadedModel) -> None:
    llama.model.base_model.layers[2].self_attn.sink = nn.Parameter(torch.zeros(4))
    with pytest.raises(NotKnown, match=r"^it has a parameter 'model.layers.2.self_attn.sink'$"):
        described(llama)


def test_weights_of_another_dtype_are_refused(llama: LoadedModel) -> None:
    llama.model.lm_head.bfloat16()
    with pytest.raises(NotKnown, match=r"^it has weights in torch.bfloat16 beside those in torch.float32$"):
        described(llama)


@pytest.mark.parametrize(
    ("where", "name", "module"),
    [
        ("self_attn", "o_proj", nn.Linear(64, 48, bias=False)),
        ("self_attn", "q_proj", nn.Linear(48, 64)),
        ("mlp", "up_proj", nn.Linear(64, 80, bias=False)),
        ("mlp", "down_proj", nn.Linear(80, 64, bias=False)),
        ("self_attn", "q_norm", nn.LayerNorm(48)),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(
    llama: LoadedModel, where: str, name: str, module: nn.Module
) -> None:
    setattr(getattr(llama.model.base_model.layers[1], where), name, module)
    with pytest.raises(NotKnown, match="^the sizes of its matrices do not fit together$"):
        described(llama)


@pytest.mark.parametrize(("name", "value"), [("down_proj_bias", torch.zeros(4, 63)), ("sinks", torch.zeros(3))])
def test_sizes_of_experts_and_sinks_that_do_not_fit_are_refused(name: str, value: torch.Tensor) -> None:
    loaded = load(FAMILIES["gpt_oss"])
    layer = loaded.model.base_model.layers[1]
    setattr(layer.self_attn if name == "sinks" else layer.mlp.experts, name, nn.Parameter(value))
    with pytest.raises(NotKnown, match="^the sizes of its matrices do not fit together$"):
        describe(loaded, dict.fromkeys(loaded.kv_shapes, replace(NO_WINDOW, has_sinks=True)))


def test_what_experts_do_with_gate_and_up_is_found_from_their_outputs() -> None:
    loaded = load(FAMILIES["mixtral"])
    experts = loaded.model.base_model.layers[1].mlp.experts
    mixture = described(loaded).layers[1].mlp
    assert mixture.activation == "silu"

    def clamped(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up.clamp(-9, 9)

    experts._apply_gate = clamped
    with pytest.raises(NotKnown, match="^its MixtralExperts combines gate and up in another way$"):
        described(loaded)


def test_only_routers_of_numbers_in_16_bits_may_choose_otherwise(llama: LoadedModel) -> None:
    mixture = described(load(FAMILIES["mixtral"]))
    assert may_round_more(mixture, torch.bfloat16, is_quantized=False)
    assert not may_round_more(mixture, torch.float32, is_quantized=False)
    assert not may_round_more(described(llama), torch.bfloat16, is_quantized=False)
    assert may_round_more(described(llama), torch.float32, is_quantized=True)


def test_projections_without_a_whole_number_of_heads_are_refused(llama: LoadedModel) -> None:
    llama.model.base_model.layers[1].self_attn.q_proj = nn.Linear(64, 72)
    with pytest.raises(NotKnown, match="^its projections have 136 rows, which make no whole heads$"):
        described(llama)


def test_the_kind_of_a_norm_is_found_from_its_outputs(llama: LoadedModel) -> None:
    plain = described(llama).final_norm
    torch.testing.assert_close(plain.weight, llama.model.base_model.norm.weight.detach())
    gemma = load(FAMILIES["gemma"])
    torch.testing.assert_close(described(gemma).final_norm.weight, gemma.model.base_model.norm.weight.detach() + 1)
    assert described(load(FAMILIES["cohere"])).final_norm.subtracts_mean
    llama.model.base_model.norm.forward = torch.tanh
    with pytest.raises(NotKnown, match="^it has norms of type LlamaRMSNorm$"):
        described(llama)


def test_values_that_are_multiplied_by_a_number_are_refused(llama: LoadedModel) -> None:
    llama.model.base_model.layers[1].self_attn.v_scale = 0.7  # MiMo-V2-Flash's
    with pytest.raises(NotKnown, match="^it multiplies its values by a number$"):
        described(llama)
