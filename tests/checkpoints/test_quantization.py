"""What a config.json says of quantized weights is read, or refused by name with what is served instead."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.quantization import Quantization, read_quantization, refuse_costly_patterns
from oaiserve.checkpoints.soundness import refuse_unless_sound
from oaiserve.checkpoints.source import find_model
from oaiserve.errors import StartupError

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
}
NOT_READ = (
    "its weights are quantized by %s, which is not read: "
    "oaiserve reads AWQ (gemm), GPTQ and compressed-tensors with integers of 4 or 8 bits"
)


def read(**settings: Any) -> Quantization | None:
    return read_quantization({"quantization_config": settings})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}, Quantization("awq", 4, 64)),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, Quantization("gptq", 8, -1, True)),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2"},
            Quantization("gptq", 4, 128, False),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*down.*": {"bits": 8}}},
            Quantization("gptq", None, None, True),
        ),
        (COMPRESSED, Quantization("compressed-tensors", None, None)),
        ({"quant_method": "mxfp4"}, None),
        ({"quant_method": "fp8"}, Quantization("fp8", 8, None)),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, Quantization("fp8", 8, None, block=(128, 64))),
        ({"quant_method": "fbgemm_fp8"}, Quantization("fbgemm_fp8", 8, None)),
        (
            COMPRESSED | {"format": "float-quantized", "config_groups": {"a": {"weights": FLOAT8}}},
            Quantization("compressed-tensors", None, None),
        ),
        (
            COMPRESSED
            | {"format": "float-quantized", "config_groups": {"a": {"weights": FLOAT8 | {"block_structure": [8, 8]}}}},
            Quantization("compressed-tensors", None, None, block=(8, 8)),
        ),
    ],
)
def test_settings_are_read(settings: dict[str, Any], expected: Quantization | None) -> None:
    assert read(**settings) == expected
    assert read_quantization({}) is read_quantization({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        *(({"quant_method": method}, NOT_READ % method) for method in ("torchao", "something new", "bitsandbytes")),
        *(({setting: True}, NOT_READ % "bitsandbytes") for setting in ("load_in_4bit", "load_in_8bit")),
        ({"quant_method": "awq", "version": "gemv"}, "by AWQ in the layout gemv, not gemm"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "by AWQ in the layout llm-awq, not gemm"),
        ({"quant_method": "awq", "bits": 8}, "by AWQ to 8 bits, not 4"),
        ({"quant_method": "gptq", "bits": 3}, "by GPTQ to 3 bits, not 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "its group_size is 0, but must be -1 or at least 1"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "in the layout marlin, not gptq or gptq_v2",
        ),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "its weights are packed in int16, not in int32"),
        ({"quant_method": "compressed-tensors"}, "its quantization_config has no config_groups"),
        (COMPRESSED | {"format": "float-quantized"}, "to int in the layout float-quantized"),
        (COMPRESSED | {"config_groups": {"a": {"weights": INT4 | {"type": "float"}}}}, "to float in the layout"),
        (COMPRESSED | {"config_groups": {"a": {"weights": INT4 | {"num_bits": 2}}}}, "to 2 bits, not 4 or 8"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "scales for blocks of [128], which are not two sizes"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "are sparse (sparse-24-bitmask)"),
        (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, "are rotated (transform_config)"),
    ],
)
def test_methods_and_layouts_that_are_not_read_are_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(BadFile) as caught:
        read(**settings)
    assert says in str(caught.value)


def test_a_folder_is_refused_before_its_weights_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(StartupError, match="config.json' cannot be used: its weights are quantized by bitsandbytes"):
        refuse_unless_sound(find_model(tmp_path))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["gptq", "int", "gemm", "pack-quantized"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["weights", "type", "num_bits", "format", "group_0"]), inner, max_size=3)
    ),
    max_leaves=8,
)
keys = st.sampled_from(
    ["bits", "group_size", "version", "format", "dynamic", "config_groups", "sparsity_config", "checkpoint_format"]
)


@given(st.sampled_from(["awq", "gptq", "compressed-tensors", None, 7]), st.dictionaries(keys, values, max_size=5))
def test_any_settings_are_read_or_refused(method: object, settings: dict[str, Any]) -> None:
    with suppress(BadFile):
        assert read_quantization({"quantization_config": settings | {"quant_method": method}}) is not None


@pytest.mark.parametrize(
    "names",
    [
        None,
        [],
        ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        [r"a\.\d+$"],
    ],
)
def test_names_of_modules_as_published_models_have_them_may_be_matched(names: list[str] | None) -> None:
    refuse_costly_patterns({"quantization_config": {"modules_to_not_convert": names}})


@pytest.mark.parametrize(
    "names", [["(.*)*x"], [".*a.*a.*a"], ["a" * 501], ["a+a+a+"], ["lm_head"] * 513, [1], "lm_head"], ids=repr
)
def test_expressions_that_could_take_unlimited_time_are_refused(names: Any) -> None:
    with pytest.raises(BadFile, match="its modules_to_not_convert"):
        refuse_costly_patterns({"quantization_config": {"modules_to_not_convert": names}})
