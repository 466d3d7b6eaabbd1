"""The reader of images and sounds: it prepares a client's file for the tower, and finds its places in a prompt.

Tokenize workers call it. What the tower gets is what transformers' processors make of a file.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import prod
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.types.media import (
    PROMPT_IMAGES,
    MediaFile,
    MediaKind,
    MediaLimits,
    Medium,
    Prepared,
    PromptMedia,
    Vectors,
)
from oaiserve.errors import Overloaded, invalid
from oaiserve.plugins.media.model.decode import TOO_LOUD, content_of, image_size
from oaiserve.plugins.media.model.forms import Form
from oaiserve.plugins.media.model.tower import NOT_FINITE, Tower, are_finite

MOST_KNOWN = 10_000  # media whose texts are kept: some kilobytes each
MOST_PENDING_BYTES = 2 * 2**30  # bytes of all media that are prepared and not yet encoded


class FileReader:
    """Prepares images and sounds of one model. Any number of threads may call it."""

    def __init__(self, forms: Mapping[MediaKind, Form], config: Any, tower: Tower, limits: MediaLimits) -> None:
        self._forms = forms
        self.placeholders: Mapping[MediaKind, str] = {kind: form.placeholder for kind, form in forms.items()}
        image = forms.get("image")
        self._image_id = -1 if image is None else image.vector_id
        self._has_runs = image is not None and image.family.has_runs(config.get_text_config(decoder=True))
        self._has_axes = image is not None and bool(image.family.shape)
        self._tower = tower
        self._limits = limits
        self.vectors = Vectors(limits.cache_bytes)
        self._known: OrderedDict[bytes, Prepared] = OrderedDict()
        self._lock = RLock()  # a collection of garbage within it may drop inputs
        self._pending_bytes = 0

    def checked(self, files: Sequence[MediaFile]) -> list[MediaFile]:
        """Return the files as bytes, once their headers have no more pixels than a prompt may have. Raises
        InvalidRequest."""
        limits = self._limits
        num_pixels = 0
        files = [replace(file, content=content_of(file, limits.max_bytes)) for file in files]
        for file in files:
            if file.kind == "image":
                num_pixels += prod(image_size(file, limits.max_pixels, limits.max_bytes))
        if num_pixels > limits.max_prompt_pixels:
            raise invalid(
                files[0].param,
                f"its images have {num_pixels} pixels together, but at most {limits.max_prompt_pixels} are decoded for "
                f"a request, {PROMPT_IMAGES} times --max-image-pixels. Send fewer or smaller ones",
            )
        return files

    def prepare(self, file: MediaFile, salt: str, *, only_text: bool = False) -> Prepared:
        """Prepare one medium, unless its vectors are in the cache, or its text is known and all that is needed. Raises
        InvalidRequest, and Overloaded."""
        content = content_of(file, self._limits.max_bytes)
        key = blake2b(f"{file.kind} {file.detail == 'low'} {salt}\n".encode(), digest_size=16)
        key.update(content)
        digest = key.digest()
        with self._lock:
            known = self._known.get(digest)
        if known is not None and only_text:
            return known
        if known is not None and (encoded := self.vectors.get(digest)) is not None:
            return replace(known, medium=replace(known.medium, encoded=encoded))
        prepared = self._process(replace(file, content=content), digest)
        with self._lock:
            self._known[digest] = replace(prepared, medium=replace(prepared.medium, inputs=None))
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        return prepared

    def _process(self, file: MediaFile, key: bytes) -> Prepared:
        form = self._forms[file.kind]
        family = form.family
        with torch.inference_mode():
            fields = form.fields(file, self._limits)
            text = family.text(form.settings, fields)
        shape = fields.get(family.shape) if family.shape else None
        inputs = {
            family.renamed.get(name, name): _smallest(value, self._tower.dtype)
            for name, value in fields.items()
            if name not in family.unused
        }
        if not are_finite(inputs.values()):
            reason = f"the sound {TOO_LOUD}" if file.kind == "audio" else f"the image {NOT_FINITE}"
            raise invalid(file.param, reason, file.where)
        num_rows = text.count(form.settings.vector)
        if not num_rows:
            raise invalid(file.param, "the sound is too short for the model", file.where)
        num_bytes = sum(tensor.nbytes for tensor in inputs.values())
        with self._lock:
            if self._pending_bytes and self._pending_bytes + num_bytes > MOST_PENDING_BYTES:
                raise Overloaded(
                    f"Media of {self._pending_bytes} bytes wait to be encoded, and {MOST_PENDING_BYTES} may.",
                    retry_after_seconds=5,
                )
            self._pending_bytes += num_bytes
        medium = Medium(file.kind, key, num_rows, _Inputs(inputs, self._give_back))
        return Prepared(medium, text, shape)

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._pending_bytes -= num_bytes

    def placed(self, token_ids: Sequence[int], prepared: Sequence[Prepared]) -> PromptMedia:
        """Return the media of a prompt, given its token ids. Raises InvalidRequest for too few or too many places."""
        vector_ids = {form.vector_id for form in self._forms.values()}
        places = array("i", (index for index, token in enumerate(token_ids) if token in vector_ids))
        num_rows = sum(one.medium.num_rows for one in prepared)
        if len(places) != num_rows:
            raise invalid("messages", f"its files have {num_rows} vectors, and its text {len(places)} places for them")
        media = PromptMedia(tuple(one.medium for one in prepared), places, runs=self._runs(token_ids))
        if not self._has_axes:
            return media
        ids = torch.tensor([list(token_ids)])
        types = (ids == self._image_id).int()
        shapes = torch.cat([one.shape for one in prepared if one.shape is not None])
        positions, delta = self._tower.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=shapes)
        return replace(media, axes=array("i", positions[:, 0].reshape(-1).tolist()), delta=int(delta))

    def _runs(self, token_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
        if not self._has_runs:
            return ()
        places = (index for index, token in enumerate(token_ids) if token == self._image_id)
        groups = itertools.groupby(enumerate(places), lambda pair: pair[1] - pair[0])
        runs = [[place for _, place in group] for _, group in groups]
        return tuple((run[0], run[-1] + 1) for run in runs)


class _Inputs(dict[str, Tensor]):
    """The tower's tensors of one medium, whose bytes count until they are dropped."""

    def __init__(self, tensors: Mapping[str, Tensor], dropped: Any) -> None:
        super().__init__(tensors)
        self._num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._dropped = dropped

    def clear(self) -> None:
        super().clear()
        num_bytes = self._num_bytes
        self._num_bytes = 0
        self._dropped(num_bytes)

    def __del__(self) -> None:
        self.clear()


def _smallest(value: Any, dtype: torch.dtype) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.is_floating_point():
        return tensor.to(dtype)
    return tensor
