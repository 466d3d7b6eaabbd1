"""The tower of a multimodal model: the modules that make vectors of prepared images and sounds, without the text model.

The text model is started by its own ways. The tower runs the multimodal model's own code up to where it calls the text
model, and takes what that would get. So the vectors are what transformers computes, in any family.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from oaiserve.checkpoints.load_errors import reported, tensors_named
from oaiserve.engine.sequences.step import OutOfMemory
from oaiserve.engine.types.media import Encoded, MediaKind, Medium
from oaiserve.errors import InvalidRequest, StartupError
from oaiserve.plugins.media.model.pieces import ATTENTION, ON_CPU, ON_GPU, cut_products, in_pieces

NOT_FINITE = "leads to numbers that are not finite (NaN or infinity) in the model"  # completes 'the image ...'
_NO_LAYERS = "Initializing zero-element tensors"  # a warning, of a text model without layers
_OF_TEXT = re.compile(r"(^|\.)(language_model|text_model|lm_head)\.")


class Tower:
    """The modules of one multimodal model that make vectors. Not for several threads at once."""

    def __init__(self, model: Any, vector_ids: Mapping[MediaKind, int], num_threads: int | None = None) -> None:
        """Take transformers' whole model, whose text model is dropped. A vector comes in the place of its kind's id.
        `num_threads` threads of torch compute it; None: as many as the caller's."""
        inner, name = next(
            (part, name)
            for part in (getattr(model, "model", model), model)
            for name in ("language_model", "text_model")
            if hasattr(part, name)
        )
        text = getattr(inner, name)
        caught = _Caught(text.get_input_embeddings().weight.shape[1], model.device, model.dtype)
        setattr(inner, name, caught)
        self.model = inner
        self.vector_ids = vector_ids
        self.device = model.device
        self.dtype = model.dtype
        self._num_threads = num_threads
        cut_products(inner)

    def pieces(self, medium: Medium) -> Iterator[Encoded | None]:
        """Make the vectors of a medium in pieces. Raises OutOfMemory if the device has none left, and InvalidRequest if
        the vectors aren't finite: a text model would make every token NaN, or cache them."""
        size = ON_GPU if self.device.type == "cuda" else ON_CPU
        try:
            for encoded in in_pieces(partial(self.encode, medium), size, self._num_threads):
                if self.device.type == "cuda":  # it has only been launched: its time would be that of the next step
                    torch.cuda.current_stream(self.device).synchronize()
                if encoded is not None and not are_finite((encoded.vectors, *encoded.deep)):
                    noun = "image" if medium.kind == "image" else "sound"
                    raise InvalidRequest(f"One {noun} of this request {NOT_FINITE}. Send another one.")
                yield encoded
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error)) from None

    def encode(self, medium: Medium) -> Encoded:
        ids = torch.full((1, medium.num_rows), self.vector_ids[medium.kind], device=self.device)
        moved = {name: tensor.to(self.device) for name, tensor in medium.inputs.items()}
        types = {name: torch.ones_like(ids) for name in ("mm_token_type_ids", "token_type_ids")}
        try:
            self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **types, **moved)
        except _Reached as reached:
            return Encoded(reached.vectors[0], reached.deep)
        raise AssertionError("the multimodal model has not called its text model")


class _Reached(BaseException):
    """The multimodal model has called its text model, with these vectors [1, rows, hidden size]."""

    def __init__(self, vectors: Tensor, deep: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.vectors = vectors
        self.deep = deep


class _Caught(torch.nn.Module):
    """Stands for the text model: a call of it ends the forward pass."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = _Zeros(width, device, dtype)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed_tokens

    def get_per_layer_inputs(self, *_: Any) -> None:
        """Return none: Gemma 4 gets these from its text model."""

    def forward(self, inputs_embeds: Tensor, deepstack_visual_embeds: list[Tensor] | None = None, **_: Any) -> NoReturn:
        raise _Reached(inputs_embeds, tuple(deepstack_visual_embeds or ()))


class _Zeros(torch.nn.Module):
    """Stands in for the embedding table, whose vectors are all replaced by those of images and sounds."""

    def __init__(self, width: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.zeros(width, device=device, dtype=dtype).expand(2**18, -1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[0].expand(*ids.shape, -1).clone()


def are_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def load_tower(
    source: Path | dict[str, Tensor],
    config: PreTrainedConfig,
    name: str,
    vector_ids: Mapping[MediaKind, int],
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int | None = None,
) -> Tower:
    """Load the tower in a folder, or of these weights. Raises StartupError if a weight is missing."""
    small = _without_text(config)
    if isinstance(source, Path):
        folder = source
        weights = None
    else:
        folder = None
        weights = source
    kind: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(small)]
    with (
        reported(f"The weights of the tower of {name} could not be loaded"),
        tensors_named(allows_unread=True),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=_NO_LAYERS)
        model, report = kind.from_pretrained(
            folder,
            config=small,
            state_dict=weights,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    wrong = [*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]
    missing = sorted(key for key in wrong if not _OF_TEXT.search(key))
    if missing:
        raise StartupError(f"{name} has no weights for {len(missing)} tensors of its tower, such as {missing[0]}.")
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and not part._supports_sdpa:  # it takes masks only as its own code does
            part.config._attn_implementation = "eager"
    return Tower(model.to(device).eval(), vector_ids, num_threads)


def tower_parameters(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    kind: Any = AutoModelForMultimodalLM
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_LAYERS)
        model = kind.from_config(_without_text(config))
    return {name: tuple(one.shape) for name, one in model.named_parameters() if not _OF_TEXT.search(name)}


def _without_text(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a model without layers of text. Callers drop its other modules of text."""
    small = copy.deepcopy(config)
    small.__dict__.pop("quantization_config", None)  # This setting belongs to the text model.
    text = small.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    for lists in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if getattr(text, lists, None):
            setattr(text, lists, [])
    return small
