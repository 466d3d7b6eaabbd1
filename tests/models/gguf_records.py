"""Small models of the families whose GGUF files are kept, and their files as llama.cpp's converter has written them.

What the converter wrote of each is recorded in a folder of JSON files: the numbers of the head, and the name, the shape
and a checksum of each tensor. Layers whose tensors have the names and shapes of an earlier layer's have only a checksum
of their checksums. Weights depend on the names of parameters alone, so that the records hold for other versions of
torch and transformers, too.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from oaiserve.checkpoints.gguf import GgufTensor
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.gguf.architecture import Architecture
from oaiserve.engine.decoder.sources.gguf.architectures import ARCHITECTURES
from oaiserve.engine.decoder.sources.gguf.names import GGUF
from oaiserve.engine.decoder.sources.gguf.settings import settings_of_gguf
from oaiserve.engine.decoder.sources.names import names_of, split_path
from oaiserve.engine.model.transformers_files.gguf_config import config_of as config_of_metadata
from oaiserve.engine.model.transformers_files.gguf_weights import paths_of_parameters
from tests.models import small_configs
from tests.models.decoders import random_model
from tests.models.gguf_files import finish
from tests.models.small_configs import sizes_of
from tests.models.small_sizes import OF_TYPE

RECORDS = Path(__file__).parent.parent / "engine" / "model" / "gguf_records"
_WINDOW = {"sliding_window": 6}
_MIXED = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# By transformers' type of the model: sizes besides those in `small_configs`.
_SIZES: dict[str, dict[str, Any]] = {
    "cohere2": {**_WINDOW, "num_hidden_layers": 5},
    "deepseek_v3": {"num_hidden_layers": 4, "first_k_dense_replace": 2},
    "ernie4_5_moe": {"moe_num_experts": 5},
    "exaone4": {**_WINDOW, "num_hidden_layers": 5},
    "gemma4_text": {"vocab_size": 320, "vocab_size_per_layer_input": 320},
    "granite": {f"{name}_multiplier": x for name, x in (("attention", 0.3), ("embedding", 2.0), ("residual", 0.5))}
    | {"logits_scaling": 3.0},
    "granitemoehybrid": {"num_local_experts": 5, "shared_intermediate_size": 32},
    "mamba2": {"intermediate_size": None, "num_heads": 4, "head_dim": 32, "n_groups": 2},
    "minimax_m2": {"rotary_dim": 16},
    "ministral3": {
        "rope_parameters": {**OF_TYPE["ministral3"]["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0}
    },
    "olmo3": _MIXED,
    "qwen3_5_moe_text": {"shared_expert_intermediate_size": 32},
    "qwen3_next": {"shared_expert_intermediate_size": 32},
    "smollm3": {"num_hidden_layers": 4},
}


def config_of(name: str) -> PreTrainedConfig:
    """Return the configuration of a small model of a type."""
    blocks = {"moe_intermediate_size": 32} if "moe_intermediate_size" in sizes_of(name) else {}  # whole ones
    return small_configs.config_of(name, **{"vocab_size": 352} | blocks | _SIZES.get(name, {}))


@torch.no_grad()
def model_of(name: str) -> PreTrainedModel:
    """Make a small model of a type, whose weights depend on their names."""
    model = random_model(config_of(name))
    for parameter, tensor in model.state_dict().items():
        rng = np.random.default_rng(zlib.crc32(parameter.encode()))
        values = 0.3 * rng.standard_normal(tuple(tensor.shape)) + ("norm" in parameter and tensor.dim() == 1)
        tensor.copy_(torch.from_numpy(np.asarray(values)))
    model.tie_weights()
    return model


def parameters_of(model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
    """Return the parameters of a model that its file has."""
    parameters = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        parameters.pop("lm_head.weight", None)
    return parameters


class Record:
    """A record has what llama.cpp's converter has written of a small model."""

    def __init__(self, name: str) -> None:
        result = json.loads((RECORDS / f"{name}.json").read_text())
        self.values: dict[str, Any] = result["values"]
        self.shapes: dict[str, tuple[int, ...]] = {key: tuple(shape) for key, (shape, _) in result["tensors"].items()}
        self.checksums: dict[str, int] = {key: checksum for key, (_, checksum) in result["tensors"].items()}
        self._layers_like_others = result.get("like", {})
        for layer, (other, of_layer) in self._layers_like_others.items():
            names = [name for name in self.shapes if name.startswith(f"{other}.")]
            self.shapes |= {name.replace(other, layer): self.shapes[name] for name in names}
            self.checksums[layer] = of_layer

    def checksums_of(self, tensors: dict[str, NDArray[np.float32]]) -> dict[str, int]:
        """Return the checksums of a file's tensors in the form in which this record has them."""
        result = {name: _checksum(values) for name, values in tensors.items()}
        for layer in self._layers_like_others:
            names = sorted(name for name in result if name.startswith(f"{layer}."))
            result[layer] = zlib.crc32(repr([result.pop(name) for name in names]).encode())
        return result

    def config(self) -> PreTrainedConfig:
        """Return the configuration that is read of the numbers."""
        return config_of_metadata(self.values, self._places())

    def settings(self) -> Settings:
        """Return the settings that are read of the numbers."""
        return settings_of_gguf(self.values, self._places())

    def _places(self) -> dict[str, GgufTensor]:
        return {name: GgufTensor(0, 0, name, 0, shape) for name, shape in self.shapes.items()}

    def file_tensors(self, model: PreTrainedModel) -> dict[str, NDArray[np.float32]]:
        """Return the tensors that a file has of a model: what is undone in reading them is done here."""
        settings = self.settings()
        family = FAMILIES[settings["model_type"]]
        architecture = ARCHITECTURES[self.values["general.architecture"]]
        parameters = parameters_of(model)
        paths = paths_of_parameters(parameters, family.names, settings["num_hidden_layers"])
        found: dict[str, NDArray[np.float32]] = {}
        for parameter, values in parameters.items():
            path, names = next(
                (path, names) for path in paths[parameter] if (names := self._names_in_file(path, architecture))
            )
            role = split_path(path)[0].removeprefix("layers.{}.")
            if role.endswith("norm.weight") and not role.startswith("mixer."):
                values = values + family.facts(settings).norm.adds_one
            if role == "mixer.A_log":
                values = -np.exp(values)
            of_matrix = role.removesuffix(".weight").removesuffix(".bias")
            if (rows := architecture.rows.get(of_matrix)) is not None:
                values = values[np.argsort(rows(settings))]
            if (columns := architecture.columns.get(of_matrix)) is not None:
                values = values[:, np.argsort(columns(settings))]
            found |= self._parts(of_matrix, values, names)
        return found

    def _names_in_file(self, path: str, architecture: Architecture) -> list[str]:
        """Return the tensors of a path; an empty list if there are none."""
        suffix = next((end for end in (".weight", ".bias") if path.endswith(end)), "")
        module = path.removesuffix(suffix)
        role, numbers = split_path(module)
        joined = architecture.joined.get(role.removeprefix("layers.{}."), ())
        choices = [[f"blk.{numbers[0]}.{part}{suffix}" for part in parts] for parts in joined]
        for one in (module, *(module.replace("gate_up", part) for part in ("gate", "up"))):
            choices += [[f"{name}{suffix}"] for name in names_of(one, {**GGUF, **architecture.names})]
        gates_and_ups = [choice[0] for choice in choices if "_exps" in choice[0] and choice[0] in self.shapes]
        if len(gates_and_ups) == 2:
            return gates_and_ups
        return next((names for names in choices if all(name in self.shapes for name in names)), [])

    def _parts(self, role: str, values: NDArray[np.float32], names: list[str]) -> dict[str, NDArray[np.float32]]:
        """Return the tensors whose rows are those of a parameter."""
        shapes = [self.shapes[name] for name in names]
        if role == "kv_up" and len(names) == 2:
            heads, _, width = shapes[1]
            keys, of_values = np.split(values.reshape(heads, -1, width), [shapes[0][2]], axis=1)
            return dict(zip(names, (keys.swapaxes(1, 2), of_values), strict=True))
        dim = 1 if len(shapes[0]) == 3 and len(shapes) > 1 else 0
        cuts = np.cumsum([shape[dim] for shape in shapes])[:-1] if len(shapes) > 1 else []
        parts = np.split(values, cuts, axis=dim)
        return {name: part.reshape(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

    def write(self, path: Path, model: PreTrainedModel, kind_of: Callable[[str], Kind]) -> None:
        """Write the file of a model, with matrices of experts and linear layers in the format that `kind_of` says."""
        writer = gguf.GGUFWriter(path, self.values["general.architecture"])
        for key, value in self.values.items():
            if key != "general.architecture":
                add = {list: "array", bool: "bool", str: "string", int: "uint32", float: "float32"}[type(value)]
                getattr(writer, f"add_{add}")(key, value)
        writer.add_array("tokenizer.ggml.tokens", [f"<{i}>" for i in range(model.config.vocab_size)])
        for name, values in self.file_tensors(model).items():
            is_matrix = name.endswith(".weight") and values.ndim > 1 and values.shape[-1] % 32 == 0
            kept_whole = any(part in name for part in ("ffn_gate_inp", "conv", "norm", "_b.weight"))
            kind = kind_of(name) if is_matrix and not kept_whole else Kind.F32
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        finish(writer)


def _checksum(values: NDArray[np.float32]) -> int:
    """Return a checksum of numbers, rounded so that another exponential function does not matter."""
    mantissas, exponents = np.frexp(values.astype(np.float64).ravel())
    return zlib.crc32(np.rint(mantissas * 4096).astype(np.int32).tobytes() + exponents.astype(np.int32).tobytes())


def records() -> list[str]:
    """Return the types of which there are records."""
    return sorted(path.stem for path in RECORDS.glob("*.json"))
