"""Reads the quantization of a checkpoint from its config.json, and refuses unsupported methods. Stdlib only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oaiserve.checkpoints.bad_file import BadFile

Method = Literal["awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8"]

READ = "AWQ (gemm), GPTQ and compressed-tensors with integers of 4 or 8 bits, FP8, gpt-oss in MXFP4, and GGUF files"
_INSTEAD = f"oaiserve reads {READ}; or take the model before it was quantized, which --quantize does here on a CPU"
_NAMES = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "compressed-tensors": "compressed-tensors",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (fbgemm)",
}
_MOST_NAMES = 512  # Python caches this many compiled expressions.
_NAME = re.compile(r"(?:[\w.^$-]|\\\.|\\d\+?|\.\*)*")
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
_INTEGER_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Quantization:
    """The format of a checkpoint's packed weights: integers, or floats of 8 bits."""

    method: Method
    bits: int | None  # None if it differs between matrices
    group_size: int | None  # None if it differs between matrices; -1 for a whole row
    zeros_less_one: bool = False  # the zeros are stored minus one, as in GPTQ's first format
    block: tuple[int, int] | None = None  # rows and columns that share a scale, for 8-bit floats in blocks

    @property
    def name(self) -> str:
        return _NAMES[self.method]


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return the quantization of a checkpoint, or None if transformers can read its weights. Raises BadFile for
    unsupported methods."""
    settings = config.get("quantization_config", config.get("compression_config"))
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise BadFile("its quantization_config is not a JSON object")
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    if method == "mxfp4":
        return None
    if method == "awq":
        version = settings.get("version") or settings.get("format") or "gemm"
        if settings.get("backend") == "llm-awq":
            version = "llm-awq"
        if str(version).lower() != "gemm":
            raise BadFile(f"its weights are quantized by AWQ in the layout {str(version)[:100]}, not gemm: {_INSTEAD}")
        return Quantization(
            "awq", _bits(settings.get("bits", 4), "AWQ", (4,)), _group_size(settings.get("group_size", 128))
        )
    if method == "gptq":
        return _gptq(settings)
    if method == "compressed-tensors":
        return _compressed(settings)
    if method == "fp8":
        return Quantization("fp8", 8, None, block=_block(settings.get("weight_block_size")))
    if method == "fbgemm_fp8":
        return Quantization("fbgemm_fp8", 8, None)
    raise BadFile(f"its weights are quantized by {str(method)[:100]}, which is not read: {_INSTEAD}")


def refuse_costly_patterns(config: Mapping[str, Any]) -> None:
    """Raise BadFile if transformers, which matches the names of all modules with `modules_to_not_convert`, could take
    unlimited time for it."""
    settings = config.get("quantization_config", config.get("compression_config"))
    names = settings.get("modules_to_not_convert") if isinstance(settings, dict) else None
    if names is None:
        return
    if not isinstance(names, list) or len(names) > _MOST_NAMES:
        raise BadFile(f"its modules_to_not_convert is not a list of at most {_MOST_NAMES} names")
    for name in names:
        is_name = isinstance(name, str) and len(name) <= 500 and _NAME.fullmatch(name) is not None
        if not is_name or name.count("*") + name.count("+") > 2:
            raise BadFile(
                f"its modules_to_not_convert has {str(name)[:100]!r}, and only names are supported, with up to two of "
                r".* and \d+ in them"
            )


def _gptq(settings: Mapping[str, Any]) -> Quantization:
    layout = (
        "marlin" if settings.get("is_marlin_format") else settings.get("checkpoint_format") or settings.get("format")
    )
    layout = str(layout or "gptq").lower()
    if layout not in ("gptq", "gptq_v2"):
        raise BadFile(
            f"its weights are quantized by GPTQ in the layout {layout[:100]}, not gptq or gptq_v2: {_INSTEAD}"
        )
    if settings.get("pack_dtype") not in (None, "int32"):
        raise BadFile(f"its weights are packed in {str(settings['pack_dtype'])[:100]}, not in int32")
    bits = _bits(settings.get("bits"), "GPTQ", (4, 8))
    group_size = _group_size(settings.get("group_size", 128))
    if settings.get("dynamic"):  # patterns of names, each with its own settings
        return Quantization("gptq", None, None, layout == "gptq")
    return Quantization("gptq", bits, group_size, layout == "gptq")


def _compressed(settings: Mapping[str, Any]) -> Quantization:
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise BadFile("its quantization_config has no config_groups")
    block: tuple[int, int] | None = None
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise BadFile("its config_groups have one without weights")
        layout = group.get("format") or settings.get("format")
        if weights.get("type") == "float" and layout in _FLOAT_FORMATS and weights.get("num_bits") == 8:
            block = _block(weights.get("block_structure")) or block
            continue
        if weights.get("type") != "int" or layout not in _INTEGER_FORMATS:
            kind = f"{str(weights.get('type'))[:20]} in the layout {str(layout)[:100]}"
            raise BadFile(f"its weights are quantized by compressed-tensors to {kind}: {_INSTEAD}")
        _bits(weights.get("num_bits"), "compressed-tensors", (4, 8))
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise BadFile(f"its weights are sparse ({str(sparsity['format'])[:100]}): {_INSTEAD}")
    transform = settings.get("transform_config")
    if isinstance(transform, dict) and transform.get("config_groups"):
        raise BadFile(f"its weights are rotated (transform_config): {_INSTEAD}")
    return Quantization("compressed-tensors", None, None, block=block)


def _block(sizes: Any) -> tuple[int, int] | None:
    if sizes is None or sizes == []:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in sizes):
        raise BadFile(f"its weights have scales for blocks of {str(sizes)[:100]}, which are not two sizes")
    return sizes[0], sizes[1]


def _bits(bits: Any, name: str, allowed: tuple[int, ...]) -> int:
    if type(bits) is not int or bits not in allowed:
        shown = " or ".join(str(number) for number in allowed)
        raise BadFile(f"its weights are quantized by {name} to {str(bits)[:20]} bits, not {shown}: {_INSTEAD}")
    return bits


def _group_size(size: Any) -> int:
    if type(size) is not int or (size != -1 and not 1 <= size < 2**31):
        raise BadFile(f"its group_size is {str(size)[:100]}, but must be -1 or at least 1")
    return size
