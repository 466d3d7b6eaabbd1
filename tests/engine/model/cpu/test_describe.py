"""The description of a model is read from its modules, and refused if it is not complete or contradicts itself."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from oaiserve.engine.decoder.description import AttentionParameters, Decoder, NotKnown
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.loaded import LoadedModel
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


SIZES = "the sizes of its matrices do not fit together"
SINK = "model.layers.2.self_attn.sink"
IN_16_BITS = nn.Linear(64, 97, bias=False).bfloat16()
# What is set in a Llama, and why it is refused then.
REFUSED = [
    (SINK, nn.Parameter(torch.zeros(4)), f"it has a parameter '{SINK}'"),
    ("lm_head", IN_16_BITS, "it has weights in torch.bfloat16 beside those in torch.float32"),
    ("model.layers.1.self_attn.o_proj", nn.Linear(64, 48, bias=False), SIZES),
    ("model.layers.1.self_attn.q_proj", nn.Linear(48, 64), SIZES),
    ("model.layers.1.self_attn.q_norm", nn.LayerNorm(48), SIZES),
    ("model.layers.1.self_attn.q_proj", nn.Linear(64, 72), "its projections have 136 rows, which make no whole heads"),
    ("model.layers.1.self_attn.v_scale", 0.7, "it multiplies its values by a number"),  # MiMo-V2-Flash's
    ("model.layers.1.mlp.up_proj", nn.Linear(64, 80, bias=False), SIZES),
    ("model.layers.1.mlp.down_proj", nn.Linear(80, 64, bias=False), SIZES),
    ("model.norm.forward", torch.tanh, "it has norms of type LlamaRMSNorm"),
]


@pytest.mark.parametrize(("name", "value", "reason"), REFUSED)
def test_what_the_description_misses_or_does_not_know_is_refused(
    llama: LoadedModel, name: str, value: object, reason: str
) -> None:
    module, _, own = name.rpartition(".")
    setattr(llama.model.get_submodule(module), own, value)
    with pytest.raises(NotKnown, match=f"^{re.escape(reason)}$"):
        described(llama)


@pytest.mark.parametrize(("name", "value"), [("down_proj_bias", torch.zeros(4, 63)), ("sinks", torch.zeros(3))])
def test_sizes_of_experts_and_sinks_that_do_not_fit_are_refused(name: str, value: torch.Tensor) -> None:
    loaded = load(FAMILIES["gpt_oss"])
    layer = loaded.model.base_model.layers[1]
    setattr(layer.self_attn if name == "sinks" else layer.mlp.experts, name, nn.Parameter(value))
    with pytest.raises(NotKnown, match=f"^{SIZES}$"):
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


def test_the_kind_of_a_norm_is_found_from_its_outputs(llama: LoadedModel) -> None:
    plain = described(llama).final_norm
    torch.testing.assert_close(plain.weight, llama.model.base_model.norm.weight.detach())
    gemma = load(FAMILIES["gemma"])
    torch.testing.assert_close(described(gemma).final_norm.weight, gemma.model.base_model.norm.weight.detach() + 1)
    assert described(load(FAMILIES["cohere"])).final_norm.subtracts_mean
