"""Checkpoints in packed integers are read as their formats say, kept exactly, and served as transformers would."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from oaiserve.checkpoints.source import find_model
from oaiserve.engine.decoder.blocks import FORMATS
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.start.compare import difference
from oaiserve.engine.start.described import describe_model
from oaiserve.errors import StartupError
from tests.engine.doubles import SimulatedEngine
from tests.engine.executors.native.small_models import EMULATED_AMX, compiled_for, config, make_model
from tests.engine.model.runners import greedy_answers
from tests.models.adapters import random_adapter
from tests.models.decoders import generate
from tests.models.in_blocks import (
    OPTIONS,
    SIZES,
    in_eight_bits,
    kept_logits,
    own_logits,
    round_inputs,
    written,
)
from tests.models.packed import Packing, weights_in, write_checkpoint
from tests.models.small_sizes import HEADS_FOR_EACH

Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN_PROJ = "model.layers.1.mlp.down_proj"
# Each with the format in which its matrices are kept.
PACKINGS = {
    "awq": (Packing("awq"), "4 bits with zeros"),
    "awq, groups of 64": (Packing("awq", group_size=64), "4 bits with zeros"),
    "awq, a group a row": (Packing("awq", group_size=-1), "4 bits with zeros"),
    "gptq": (Packing("gptq"), "4 bits with zeros"),
    "gptq, symmetric": (Packing("gptq", is_symmetric=True), "Q4_0"),
    "gptq, any order": (Packing("gptq", has_act_order=True), "4 bits with zeros"),
    "gptq, symmetric, any order": (Packing("gptq", group_size=64, is_symmetric=True, has_act_order=True), "Q4_0"),
    "gptq, a group a row": (Packing("gptq", group_size=-1), "4 bits with zeros"),
    "gptq, 8 bits": (Packing("gptq", bits=8), "8 bits with zeros"),
    "gptq, 8 bits, symmetric": (Packing("gptq", bits=8, is_symmetric=True), "Q8_0"),
    "gptq's second format": (Packing("gptq_v2", has_act_order=True), "4 bits with zeros"),
    "gptq's second format, 8 bits": (Packing("gptq_v2", bits=8, group_size=64), "8 bits with zeros"),
    "compressed-tensors": (Packing("pack-quantized", is_symmetric=True, scales=torch.bfloat16), "Q4_0"),
    "compressed-tensors with zeros": (Packing("pack-quantized", group_size=64), "4 bits with zeros"),
    "compressed-tensors, any order": (Packing("pack-quantized", has_act_order=True), "4 bits with zeros"),
    "compressed-tensors, packed 8 bits": (Packing("pack-quantized", bits=8, is_symmetric=True), "Q8_0"),
    "compressed-tensors, int8": (Packing("int-quantized", bits=8, group_size=-1, is_symmetric=True), "Q8_0"),
    "compressed-tensors, int8 with zeros": (Packing("int-quantized", bits=8), "8 bits with zeros"),
}


@pytest.mark.parametrize("name", PACKINGS)
def test_every_weight_is_that_of_the_format_exactly(name: str, tmp_path: Path) -> None:
    packing, kept_in = PACKINGS[name]
    model = written(tmp_path, packing)
    weights = weights_in(tmp_path)
    assert weights.names() == {name for name, _ in model.named_parameters()}
    for parameter_name, parameter in model.named_parameters():
        assert weights.shape(parameter_name) == tuple(parameter.shape)
        assert torch.equal(weights.tensor(parameter_name).float(), parameter.float()), parameter_name
        blocks = weights.blocks(parameter_name)
        is_packed = ".self_attn." in parameter_name or ".mlp." in parameter_name
        assert (blocks is not None) == is_packed
        if blocks is not None:
            assert FORMATS[blocks.kind].name == kept_in
            assert torch.equal(blocks.expand(), parameter.float()), parameter_name


def test_scales_that_no_16_bits_hold_and_groups_that_are_no_blocks_are_expanded(tmp_path: Path) -> None:
    model = written(tmp_path / "tiny", Packing("pack-quantized", is_symmetric=True, scales=torch.bfloat16))
    tensors = load_file(tmp_path / "tiny" / "model.safetensors")
    tensors[f"{Q_PROJ}.weight_scale"][3, 0] = 1e-9
    save_file(tensors, tmp_path / "tiny" / "model.safetensors")
    weights = weights_in(tmp_path / "tiny")
    assert weights.blocks(f"{Q_PROJ}.weight") is None
    assert weights.blocks(f"{DOWN_PROJ}.weight") is not None
    model = written(tmp_path / "small groups", Packing("gptq", group_size=16))
    weights = weights_in(tmp_path / "small groups")
    assert weights.blocks(f"{Q_PROJ}.weight") is None
    expected = model.get_parameter(f"{Q_PROJ}.weight")
    assert torch.equal(weights.tensor(f"{Q_PROJ}.weight"), expected)


def with_inputs_in_eight_bits(model: PreTrainedModel, packing: Packing, but: tuple[str, ...] = ()) -> PreTrainedModel:
    """Have the model's quantized matrices read what those of the native step read: groups of 32 in 8 bits."""

    def rounded(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        order = torch.from_numpy(packing.group_of(inputs[0].shape[-1])).argsort(stable=True)
        out = torch.empty_like(inputs[0])
        out[..., order] = in_eight_bits(module, (inputs[0][..., order],))
        return out

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", *but)):
            round_inputs(module, rounded)
    return model


SERVED = {  # and the family that is served so
    "awq": "llama",
    "gptq, any order": "qwen2",
    "gptq, 8 bits": "qwen3",
    "compressed-tensors": "gemma2",
    "compressed-tensors, any order": "phi3",
    "compressed-tensors, int8": "granite",
    # Their queries, keys and values are one matrix, whose rows are sorted by head.
    "gptq, symmetric, any order": "gpt_neox",
    "gptq": "gpt_neox",
    "awq, groups of 64": "persimmon",
    "compressed-tensors with zeros": "persimmon",
}
CHANGES = {
    "phi3": {"vocab_size": 32064},  # its padding is token 32,000
    **dict.fromkeys(("gpt_neox", "persimmon"), HEADS_FOR_EACH),
}


@pytest.fixture(params=["native", pytest.param(EMULATED_AMX, marks=pytest.mark.kernels)])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute with the code for this CPU, and with that for AMX, which rounds some inputs otherwise."""
    with compiled_for(request.param):
        yield


@pytest.mark.usefixtures("instructions")
@pytest.mark.compiler
@pytest.mark.parametrize("case", SERVED)
def test_answers_are_those_of_transformers_with_the_same_weights(case: str, tmp_path: Path) -> None:
    family = SERVED[case]
    packing, _ = PACKINGS[case]
    model = with_inputs_in_eight_bits(written(tmp_path, packing, family, **CHANGES.get(family, {})), packing)
    prompts = [[5, 9, 3, 17], list(range(40, 63)), [7]]
    with SimulatedEngine.from_pretrained(tmp_path, OPTIONS) as engine:
        assert greedy_answers(engine, prompts) == generate(model, prompts, 12)


@pytest.mark.usefixtures("instructions")
@pytest.mark.compiler
@pytest.mark.parametrize(
    "packing",
    [Packing("awq", group_size=128), Packing("gptq", group_size=128, has_act_order=True)],
    ids=lambda packing: packing.layout,
)
def test_groups_of_128_are_kept_exactly_and_read_numbers_with_more_bits(packing: Packing, tmp_path: Path) -> None:
    model = written(tmp_path, packing, hidden_size=256, intermediate_size=512, num_attention_heads=16)
    weights = weights_in(tmp_path, is_long=True)
    for name in (f"{Q_PROJ}.weight", f"{DOWN_PROJ}.weight"):
        blocks = weights.blocks(name)
        assert FORMATS[blocks.kind].name == "4 bits, scales of 128"
        assert torch.equal(blocks.expand(), model.get_parameter(name).float())
    if not Library(torch.float32).has_integer_tiles():  # then they are kept with scales of 32
        model = with_inputs_in_eight_bits(model, packing)
    assert difference(kept_logits(tmp_path, 20), own_logits(model, 20)) < 0.02


@pytest.mark.usefixtures("instructions")
@pytest.mark.compiler
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_adapters_read_what_a_matrix_reads_in_the_order_of_the_model(family: str, tmp_path: Path) -> None:
    packing, _ = PACKINGS["gptq, any order"]
    model = with_inputs_in_eight_bits(written(tmp_path, packing, family, **CHANGES.get(family, {})), packing)
    _, decoder, *_ = describe_model(find_model(tmp_path), OPTIONS)
    adapter = random_adapter(decoder.adaptable(), 1)
    found = kept_logits(tmp_path, 20, adapter)
    assert difference(found, own_logits(model, 20, adapter)) < 0.02


@pytest.mark.usefixtures("instructions")
@pytest.mark.compiler
def test_matrices_that_read_one_input_in_several_orders_are_expanded(tmp_path: Path) -> None:
    """Quantizing gives the queries, keys and values of a layer one order, but a file may say anything."""
    packing = Packing("gptq", has_act_order=True)
    model = make_model(config("llama", **SIZES))
    write_checkpoint(tmp_path, model, packing)
    other = replace(packing).quantize(model.get_parameter(f"{Q_PROJ}.weight").detach().numpy(), seed=1)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {name: tensor.contiguous() for name, tensor in packing.tensors(Q_PROJ, other).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model.get_parameter(f"{Q_PROJ}.weight").data = torch.from_numpy(other.weights())
    but = ("0.self_attn.q_proj", "0.self_attn.k_proj", "0.self_attn.v_proj")
    expected = own_logits(with_inputs_in_eight_bits(model, packing, but), 20)
    assert difference(kept_logits(tmp_path, 20), expected) < 0.02


def test_only_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, Packing("gptq"))
    path = tmp_path / "model.safetensors"
    biases = {f"{Q_PROJ}.bias": torch.zeros(64), f"{DOWN_PROJ}.bias": torch.ones(64)}
    save_file(load_file(path) | biases, path)
    assert weights_in(tmp_path).zero_biases() == {f"{Q_PROJ}.bias"}


def test_without_the_native_step_weights_are_expanded(tmp_path: Path) -> None:
    model = written(tmp_path, Packing("awq"))
    prompts = [[5, 9, 3, 17], [7]]
    with SimulatedEngine.from_pretrained(tmp_path, replace(OPTIONS, compile=False)) as engine:
        assert greedy_answers(engine, prompts) == generate(model, prompts, 12)


# -- files that are broken --------------------------------------------------------------------------------------------

Change = Callable[[torch.Tensor], torch.Tensor] | None  # change of a tensor; None: it is missing


def filled(place: int, value: int) -> Change:
    return lambda tensor: tensor.flatten().index_fill(0, torch.tensor([place]), value).view(tensor.shape)


AWQ = Packing("awq")
GPTQ = Packing("gptq")
PACKED = Packing("pack-quantized")
INT8 = Packing("int-quantized", bits=8)
# By case: the packing, a tensor of one matrix, its change, and what is said.
BROKEN: dict[str, tuple[Packing, str, Change, str]] = {
    "rows of awq": (AWQ, "qweight", lambda own: own[:40], "has 2 groups for 40 columns; config.json says 32 for each"),
    "columns of awq": (AWQ, "qweight", lambda own: own[:, :5], "but its scales are for 64 rows"),
    "zeros of awq": (AWQ, "qzeros", lambda own: own[:1], "has qzeros of the shape (1, 8), and not (2, 8)"),
    "no zeros": (AWQ, "qzeros", None, "has no qzeros next to it"),
    "floats": (AWQ, "qweight", torch.Tensor.float, "of torch.float32, and not 2 of int32"),
    "rows of gptq": (GPTQ, "qweight", lambda own: own[:7], "has a group for each of 64 columns, and not 56"),
    "groups": (GPTQ, "scales", lambda own: own[:1], "has qzeros of the shape (2, 8), and not (1, 8)"),
    "g_idx": (Packing("gptq", has_act_order=True), "g_idx", filled(5, 2), "of the groups 0 to 2, but only 2 groups"),
    "negative g_idx": (GPTQ, "g_idx", filled(5, -1), "of the groups -1 to 1, but only 2 groups"),
    "short g_idx": (GPTQ, "g_idx", lambda own: own[:60], "has a group for each of 60 columns, and not 64"),
    "uneven g_idx": (GPTQ, "g_idx", filled(5, 1), "has groups of 31 to 33 columns"),
    "size": (PACKED, "weight_packed", lambda own: own[:, :7], "has the shape (64, 7), which does not hold 64 columns"),
    "columns in its shape": (PACKED, "weight_shape", filled(1, 63), "63 columns, which make no 2 groups of one size"),
    "rows in its shape": (
        Packing("pack-quantized", is_symmetric=True),
        *("weight_shape", filled(0, 60), "has 64 rows, but its weight_shape says 60"),
    ),
    "no shape": (PACKED, "weight_shape", filled(0, -64), "has the weight_shape [-64, 64], which is none of a matrix"),
    "int8": (INT8, "weight", torch.Tensor.int, "torch.int32, and not 2 and int8"),
    "scales": (INT8, "weight_scale", lambda own: own[:9], "has scales of the shape (9, 2), but 64 rows"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_parts_that_do_not_fit_together_are_refused(case: str, tmp_path: Path) -> None:
    packing, part, change, says = BROKEN[case]
    written(tmp_path, packing)
    tensors = load_file(tmp_path / "model.safetensors")
    own = tensors.pop(f"{Q_PROJ}.{part}")
    changed = {} if change is None else {f"{Q_PROJ}.{part}": change(own).contiguous()}
    save_file(tensors | changed, tmp_path / "model.safetensors")
    weights = weights_in(tmp_path)
    with pytest.raises(StartupError) as caught:
        [weights.tensor(name) for name in sorted(weights.names())]
    assert str(caught.value).startswith(f"'{tmp_path}/model.safetensors' cannot be used: its tensor '{Q_PROJ}.")
    assert says in str(caught.value)


def test_a_group_size_that_is_not_that_of_config_json_is_refused(tmp_path: Path) -> None:
    written(tmp_path, Packing("gptq", group_size=64))
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"group_size": 64', '"group_size": 32'))
    with pytest.raises(StartupError, match=r"has 1 groups for 64 columns; config\.json says 32 for each"):
        weights_in(tmp_path).tensor(f"{Q_PROJ}.weight")


def test_a_checkpoint_without_packed_matrices_is_refused(tmp_path: Path) -> None:
    written(tmp_path, Packing("gptq"))
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match="has no weights in the layout that its config.json names"):
        weights_in(tmp_path)
