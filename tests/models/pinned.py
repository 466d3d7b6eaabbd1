"""Small models whose descriptions are pinned as text: python -m tests.models.pinned [NAME ...] updates the files.

A file may begin with `like OTHER`. Then it has only what differs from another file: `@ first, end` before the lines
that replace those lines of the other one.

Weights depend on the names of parameters alone, so that other versions of torch and transformers make the same ones.
"""

import hashlib
import sys
from collections.abc import Callable
from difflib import SequenceMatcher
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.start.described import Described, describe_model
from tests.engine.executors.native.small_models import FAMILIES, GEMMA4, GROUPED_MOE, LATENT, config
from tests.models import small_configs
from tests.models.decoders import random_model
from tests.models.fingerprints import fingerprint
from tests.models.gguf_records import Record, model_of

FILES = Path(__file__).parent.parent / "engine" / "decoder" / "pinned_descriptions"
_LIKE = "like "
GGUF_OPTIONS = EngineOptions(block_size=16, kv_blocks=8, dtype="float32", cpu_threads=1)
# Types in addition to those of small_models.py.
_OTHERS = (
    *("cohere2_moe", "cwm", "dots1", "exaone_moe", "flex_olmo", "gemma4_unified_text", "glm4_moe_lite", "granite_swa"),
    *("granitemoe_swa", "internlm3", "iquestcoder", "jais2", "mellum", "minicpm3", "solar_open", "vaultgemma"),
    *("hunyuan_v1_dense", "qwen3_5_moe_text"),  # There are GGUF files of these.
)


class Pinned(NamedTuple):
    config: PreTrainedConfig
    dtype: torch.dtype = torch.float32


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0] * 8, **_YARN}
_BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
_WINDOW = {"sliding_window": 6}
_OTHER_ROTARY_TABLES = {
    "llama, linear": config("llama", **_rope("linear", factor=4.0)),
    "llama, dynamic": config("llama", **_rope("dynamic", factor=4.0, original_max_position_embeddings=64)),
    "llama, yarn": config("llama", **_rope("yarn", **_YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5)),
    "phi3, longrope": config("phi3", original_max_position_embeddings=32, **_rope("longrope", **_LONG)),
    "gemma3_text, linear in full layers": config(
        "gemma3_text", **_WINDOW, num_hidden_layers=6, rope_parameters=_BY_TYPE, query_pre_attn_scalar=8
    ),
    "deepseek_v3, yarn": config(
        "deepseek_v3",
        **LATENT,
        **GROUPED_MOE,
        num_experts_per_tok=3,
        q_lora_rank=24,
        **_rope("yarn", **_YARN, mscale=1.0, mscale_all_dim=0.8),
    ),
    "hunyuan_v1_dense, alpha": config("hunyuan_v1_dense", **_rope("dynamic", alpha=50.0, factor=1.0)),
    "gpt_oss, yarn": small_configs.config_of("gpt_oss", **_WINDOW, **_rope("yarn", **_YARN, truncate=False)),
    "qwen2, windows": config("qwen2", **_WINDOW, use_sliding_window=True, max_window_layers=2),
    "granitemoehybrid, rotated": small_configs.config_of("granitemoehybrid", position_embedding_type="rope"),
}
# In 16 bits, the factors of embeddings are rounded, but not what a description has in float32.
_NO_SQUARE = {"hidden_size": 96, "head_dim": 32}
_IN_16_BITS = {
    "gemma": config("gemma", **_NO_SQUARE),
    "gemma4_text": config(
        "gemma4_text",
        **GEMMA4,
        **_NO_SQUARE,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=97,
    ),
    **{
        name: FAMILIES[name]
        for name in ("granite", "nemotron", "gpt_neox", "ernie4_5_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "bamba")
    },
}
PINNED = {
    **{name: Pinned(asked) for name, asked in FAMILIES.items()},
    **{name: Pinned(small_configs.config_of(name)) for name in _OTHERS},
    **{name: Pinned(asked) for name, asked in _OTHER_ROTARY_TABLES.items()},
    **{f"{name} in 16 bits": Pinned(asked, torch.bfloat16) for name, asked in _IN_16_BITS.items()},
}


def pinned_model(name: str) -> PreTrainedModel:
    """Make the model of one of PINNED."""
    pinned = PINNED[name]
    return model_with_numbers(pinned.config, pinned.dtype)


def model_with_numbers(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Make a model whose weights depend on the names of its parameters alone."""
    model = random_model(config, dtype=dtype)
    if (rotary := getattr(model.base_model, "rotary_emb", None)) is not None:
        model.base_model.rotary_emb = type(rotary)(
            model.config
        )  # a model that is loaded has its frequencies in float32
    fill(model)
    return model


def fill(model: PreTrainedModel, name_of: Callable[[str], str | None] = str) -> None:
    """Give a model's tensors their numbers, by the names that they have, or that `name_of` returns for these.

    Tensors for which it returns None stay as they are.
    """
    with torch.no_grad():
        for parameter, tensor in model.state_dict().items():
            if tensor.is_floating_point() and (name := name_of(parameter)) is not None:
                tensor.copy_(_numbers(name, tensor.shape))
    model.tie_weights()


def text_of(name: str) -> str:
    """Describe one of PINNED as text, by its files."""
    dtype: Any = str(PINNED[name].dtype).removeprefix("torch.")
    with TemporaryDirectory() as folder:
        pinned_model(name).save_pretrained(folder)
        described = describe_model(find_model(folder), EngineOptions(dtype=dtype, compile=False))
        return fingerprint(described.decoder, described.spec)


def quantized(name: str, folder: Path) -> Described:
    """Describe the GGUF file of a record, in Q8_0."""
    path = folder / "model.gguf"
    Record(name).write(path, model_of(name), lambda _: GGMLQuantizationType.Q8_0)
    return describe_model(find_model(path), GGUF_OPTIONS)


def file_of(name: str) -> Path:
    return FILES / f"{name.replace(', ', '_').replace(' ', '_')}.txt"


def pinned_text(name: str) -> str:
    """Return the pinned description of one of PINNED."""
    return "".join(_lines_in(file_of(name)))


def _lines_in(path: Path) -> list[str]:
    """Return the lines of a description, those that its file shares with others included."""
    first, *rest = path.read_text().splitlines(keepends=True)
    if not first.startswith(_LIKE):
        return [first, *rest]
    lines = _lines_in(path.with_stem(first.removeprefix(_LIKE).strip()))
    starts = [number for number, line in enumerate(rest) if line.startswith("@")]
    for start, end in reversed(list(pairwise([*starts, len(rest)]))):
        begin_of_other, end_of_other = map(int, rest[start].removeprefix("@").split(","))
        lines[begin_of_other:end_of_other] = rest[start + 1 : end]
    return lines


def _differences(other: list[str], lines: list[str]) -> list[str]:
    result: list[str] = []
    for tag, *of_other, begin, end in SequenceMatcher(None, other, lines, autojunk=False).get_opcodes():
        if tag != "equal":
            result += ["@ {}, {}\n".format(*of_other), *lines[begin:end]]
    return result


def _write(texts: dict[str, list[str]]) -> None:
    """Write each description as what differs from an earlier one, unless the whole is shorter."""
    written: dict[str, list[str]] = {}
    for stem, lines in texts.items():
        forms = [lines, *([f"{_LIKE}{other}\n", *_differences(written[other], lines)] for other in written)]
        FILES.joinpath(f"{stem}.txt").write_text(min(map("".join, forms), key=len))
        written[stem] = lines


def _numbers(name: str, shape: torch.Size) -> torch.Tensor:
    """Return numbers for a parameter that are the same on every machine, a few of which are large, as in real ones."""
    data = hashlib.shake_256(name.encode()).digest(2 * shape.numel())
    is_near_one = len(shape) < 2 and name.endswith(("norm.weight", "layer_scalar"))
    return torch.from_numpy(_numbers_of_bytes(is_near_one)[np.frombuffer(data, "<u2")]).reshape(shape)


@cache
def _numbers_of_bytes(is_near_one: bool) -> NDArray[np.float32]:
    """Return the number for each pair of bytes."""
    even = np.arange(2**16, dtype=np.uint16).view(np.int16).astype(np.float64) / 2**15
    return (even * even * even + is_near_one).astype(np.float32)


def main(names: list[str]) -> None:
    texts = {path.stem: _lines_in(path) for path in sorted(FILES.glob("*.txt"))}
    texts |= {file_of(name).stem: text_of(name).splitlines(keepends=True) for name in names or PINNED}
    _write(dict(sorted(texts.items())))


if __name__ == "__main__":
    FILES.mkdir(parents=True, exist_ok=True)
    main(sys.argv[1:])
