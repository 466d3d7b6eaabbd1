"""The reader of images: it decodes a client's file, prepares it for the tower, and finds its places in a prompt.

Tokenize workers call it. Sizes and pixels are transformers' image processor's.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor

from oaiserve.engine.media import MediaFile, Medium, Prepared, PromptMedia, Vectors
from oaiserve.engine.model.media.decode import content_of, decode_image
from oaiserve.engine.model.media.families import IMAGES, ImageFamily, Settings
from oaiserve.engine.model.media.tower import Tower
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import Overloaded, StartupError, invalid
from oaiserve.facts.media import MediaLimits

MOST_KNOWN = 10_000  # images whose texts are kept: some kilobytes each
MOST_PENDING_BYTES = 2 * 2**30  # of all images that are prepared and not yet encoded


class ImageReader:
    """Prepares images of one model. Any number of threads may call it."""

    def __init__(self, config: Any, settings: Settings, tower: Tower, limits: MediaLimits) -> None:
        self._family: ImageFamily = IMAGES[config.model_type]
        self._settings = settings
        named = self._family.placeholder
        self.placeholder: str = settings.tokens.get(named, named) or settings.vector
        self._arguments = dict(self._family.arguments(self._settings))
        self._has_runs = self._family.has_runs(config.get_text_config(decoder=True))
        self._tower = tower
        self._limits = limits
        self.vectors = Vectors(limits.cache_bytes)
        self._known: OrderedDict[bytes, Prepared] = OrderedDict()
        self._lock = Lock()
        self._pending_bytes = 0

    def prepare(self, file: MediaFile, salt: str, *, only_text: bool = False) -> Prepared:
        """Prepare one image, unless its vectors are in the cache, or its text is known and all that is needed. Raises
        InvalidRequest, and Overloaded."""
        content = content_of(file, self._limits.max_bytes)
        key = blake2b(f"{file.detail == 'low'} {salt}\n".encode(), digest_size=16)
        key.update(content)
        found = key.digest()
        with self._lock:
            known = self._known.get(found)
        if known is not None and only_text:
            return known
        if known is not None and (encoded := self.vectors.get(found)) is not None:
            return replace(known, medium=replace(known.medium, encoded=encoded))
        prepared = self._process(replace(file, content=content), found)
        with self._lock:
            self._known[found] = replace(prepared, medium=replace(prepared.medium, inputs=None))
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        return prepared

    def _process(self, file: MediaFile, key: bytes) -> Prepared:
        image = decode_image(file, self._limits.max_pixels, self._limits.max_bytes)
        with torch.inference_mode():
            try:
                fields: dict[str, Any] = dict(
                    self._settings.processor(images=[image], return_tensors="pt", **self._arguments)
                )
            except ValueError as error:  # such as an image that is far longer than wide
                raise invalid(file.param, f"the model's image processor refuses an image: {error}") from error
            text = self._family.text(self._settings, fields)
        shape = fields.get(self._family.shape) if self._family.shape else None
        inputs = {
            name: _smallest(value, self._tower.dtype)
            for name, value in fields.items()
            if name not in self._family.unused
        }
        num_bytes = sum(tensor.nbytes for tensor in inputs.values())
        with self._lock:
            if self._pending_bytes and self._pending_bytes + num_bytes > MOST_PENDING_BYTES:
                raise Overloaded(
                    f"Images of {self._pending_bytes} bytes wait to be encoded, and {MOST_PENDING_BYTES} may.",
                    retry_after_seconds=5,
                )
            self._pending_bytes += num_bytes
        medium = Medium("image", key, text.count(self._settings.vector), _Inputs(inputs, self._give_back))
        return Prepared(medium, text, shape)

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._pending_bytes -= num_bytes

    def placed(self, token_ids: Sequence[int], prepared: Sequence[Prepared]) -> PromptMedia:
        """Return the media of a prompt, given its token ids. Raises InvalidRequest if its places are not as many."""
        places = array("i", (index for index, token in enumerate(token_ids) if token == self._tower.vector_id))
        num_rows = sum(one.medium.num_rows for one in prepared)
        if len(places) != num_rows:
            raise invalid("messages", f"its images have {num_rows} vectors, and its text {len(places)} places for them")
        media = PromptMedia(tuple(one.medium for one in prepared), places, runs=self._runs(places))
        if not self._family.shape:
            return media
        ids = torch.tensor([list(token_ids)])
        types = (ids == self._tower.vector_id).int()
        shapes = torch.cat([one.shape for one in prepared if one.shape is not None])
        positions, delta = self._tower.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=shapes)
        return replace(media, axes=array("i", positions[:, 0].reshape(-1).tolist()), delta=int(delta))

    def _runs(self, places: Sequence[int]) -> tuple[tuple[int, int], ...]:
        if not self._has_runs:
            return ()
        groups = itertools.groupby(enumerate(places), lambda pair: pair[1] - pair[0])
        runs = [[place for _, place in group] for _, group in groups]
        return tuple((run[0], run[-1] + 1) for run in runs)


class _Inputs(dict[str, Tensor]):
    """The tower's tensors of one image, whose bytes count until they are dropped."""

    def __init__(self, tensors: Mapping[str, Tensor], dropped: Any) -> None:
        super().__init__(tensors)
        self._num_bytes, self._dropped = sum(tensor.nbytes for tensor in tensors.values()), dropped

    def clear(self) -> None:
        """Drop the tensors."""
        super().clear()
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._dropped(num_bytes)

    def __del__(self) -> None:
        self.clear()


def _smallest(value: Any, dtype: torch.dtype) -> Tensor:
    tensor = torch.as_tensor(value)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def read_settings(folder: Path, tokenizer: Tokenizer, vector_id: int) -> Settings:
    """Read the settings in a model's folder. Raises StartupError if the tokenizer lacks the token of vectors."""
    vector = tokenizer.backend.id_to_token(vector_id)
    if vector is None:
        raise StartupError(f"The tokenizer has no token {vector_id}, in whose place config.json puts images.")
    processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    return Settings(_values(folder), _tokens(folder), processor, vector)


def _values(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            values |= {key: value for key, value in found.items() if not isinstance(value, dict)}
    return values


def _tokens(folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens that a tokenizer names."""
    found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    for group in ("extra_special_tokens", "model_specific_special_tokens"):
        found |= found[group] if isinstance(found.get(group), dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
