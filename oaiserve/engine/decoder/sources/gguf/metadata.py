"""The metadata of a GGUF file, and the fields of a config.json that follow from it in several families."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from oaiserve.checkpoints.bad_file import BadFile, refuse_too_large
from oaiserve.checkpoints.gguf import GgufTensor, prefix_of_sizes

_TOKENIZER = "tokenizer.ggml."
_DEFAULT_THETA = 10000.0

Fields = dict[str, Any]


class Metadata:
    """The metadata of a file, by names without the architecture's prefix, and the file's tensors."""

    def __init__(self, values: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> None:
        known = prefix_of_sizes(values)
        if known is None:
            raise BadFile("it does not say how many layers its model has")
        self.architecture = known
        self._values = values
        self.tensors = tensors

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value. Raises BadFile for an integer that is too large to compute with."""
        key = f"{self.architecture}.{name}"
        value = self._values.get(key)
        if value is None:
            return default
        refuse_too_large(key, value)
        return value

    def __getitem__(self, name: str) -> Any:
        """Return a value. Raises BadFile if it is missing."""
        if (value := self.get(name)) is None:
            raise BadFile(f"it has no number {self.architecture}.{name}")
        return value

    def token(self, name: str) -> int | None:
        """Return the id of the token with a role. -1: the file's value is not an id. None: the file has no value."""
        token_id = self._values.get(f"{_TOKENIZER}{name}_token_id")
        if token_id is None or type(token_id) is int:
            return token_id
        return -1

    def has(self, pattern: str) -> bool:
        """Return whether a tensor's name matches this pattern."""
        return self.shape(pattern) is not None

    def shape(self, pattern: str) -> tuple[int, ...] | None:
        """Return the shape of the first tensor whose name matches this pattern, or None if there is none."""
        return next((tensor.shape for name, tensor in self.tensors.items() if re.search(pattern, name)), None)

    @property
    def vocab_size(self) -> int:
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise BadFile("it has no embedding")
        return embedding.shape[0]

    @property
    def num_layers(self) -> int:
        """The number of layers, excluding those at the end that only predict further tokens."""
        return int(self["block_count"] - self.get("nextn_predict_layers", 0))

    def of_layers(self, name: str) -> list[Any]:
        """Return a value for each layer. A file has either one value for all layers or a list."""
        values = self[name]
        if isinstance(values, list):
            return values[: self.num_layers]
        return [values] * self.num_layers

    @property
    def head_dim(self) -> int:
        heads = self.get("attention.head_count") or 1  # missing in models without attention
        return int(self.get("attention.key_length") or self["embedding_length"] // heads)


def no_fields(_: Metadata) -> Fields:
    return {}


def rope(metadata: Metadata, head_dim: int) -> Fields:
    """Return the parameters of rotary embeddings for heads of this width."""
    fields: Fields = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base", _DEFAULT_THETA)}
    rotated = metadata.get("rope.dimension_count", head_dim)
    if rotated < head_dim:
        fields["partial_rotary_factor"] = rotated / head_dim
    # Files from 2023 have only the factor of a linear scaling, some under its first name.
    kind = metadata.get("rope.scaling.type", "linear")
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear")) or None
    if kind == "linear" and factor is not None:
        fields |= {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor is not None:
        names = {
            "original_max_position_embeddings": "original_context_length",
            "attention_factor": "attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        scaling = {field: metadata.get(f"rope.scaling.{name}") for field, name in names.items()}
        fields |= {"rope_type": "yarn", "factor": factor} | {field: n for field, n in scaling.items() if n is not None}
    return fields


def rope_axes(section: list[int], *, is_interleaved: bool) -> list[int]:
    """Return the axis of each rotated pair, given the number of pairs for time, height and width."""
    if not is_interleaved:
        return [axis for axis, number in enumerate(section) for _ in range(number)]
    return [pair % 3 if pair < 3 * section[pair % 3] else 0 for pair in range(sum(section))]


def axes(metadata: Metadata) -> Fields:
    """Return the axes of rotated pairs, from the file's number of pairs per axis."""
    is_interleaved = metadata.architecture != "qwen2vl"
    return {"rope_axes": rope_axes(metadata["rope.dimension_sections"][:3], is_interleaved=is_interleaved)}


def windows(metadata: Metadata) -> Fields:
    """Return which layers have a sliding window, if the file says so."""
    pattern = metadata.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {}
    return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern]}
