"""Starts what reads the images and sounds of a multimodal model. Its text model starts by any of the usual ways."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from oaiserve.checkpoints.load_errors import reported
from oaiserve.engine.encoder import Media
from oaiserve.engine.model.device import select_device
from oaiserve.engine.model.model_config import select_dtype
from oaiserve.engine.model.transformers_files.wrapper import text_config
from oaiserve.engine.start.load import config_of
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.types.media import MediaKind, MediaLimits
from oaiserve.plugins.media.model.forms import NOUNS, Form, form_of, kinds_of, read_settings
from oaiserve.plugins.media.model.mmproj import NotRead, read_mmproj
from oaiserve.plugins.media.model.reader import FileReader
from oaiserve.plugins.media.model.tower import load_tower
from oaiserve.system_cpus import default_threads

log = logging.getLogger(__name__)


def load_media(request: StartRequest, mmproj: Path | None = None) -> Media | None:
    """Load the tower of a multimodal model, or that in the `mmproj` of a GGUF file. Return None if it reads none."""
    source = request.source
    options = request.options
    with reported(f"No model could be loaded from {source.shown}"):
        config = config_of(source)
    text = text_config(config)
    mmproj_files = None
    try:
        if mmproj is not None:
            mmproj_files = read_mmproj(mmproj, config, request.tokenizer)
            text = config
            config = mmproj_files.config
    except NotRead as reason:
        log.warning("Images are not read of '%s', and the model is served for text alone: %s", mmproj, reason)
        return None
    kinds = kinds_of(config)
    if not kinds or text is None:
        log.warning(
            "Images and sounds are not read by a model of the type %s: it is served for text alone", config.model_type
        )
        return None
    forms: dict[MediaKind, Form] = {}
    for kind in kinds:
        try:
            if mmproj_files is None:
                settings = read_settings(kind, source.path, config, request.tokenizer)
            else:
                settings = mmproj_files.settings
            forms[kind] = form_of(kind, config, settings)
        except (ImportError, OSError) as error:  # Pillow, soundfile, what the processor needs, or its file
            log.warning("%s are not read: %s", NOUNS[kind], str(error).strip().partition("\n")[0])
    if not forms:
        return None
    device = select_device(options.device)
    dtype = select_dtype(options.dtype, text, device, is_gguf=mmproj_files is not None, for_tensor_cores=True)
    num_threads = options.cpu_threads or default_threads() if device.type == "cpu" else None
    limits = MediaLimits(max_pixels=options.max_image_pixels)
    weights: Path | dict[str, Tensor]
    if mmproj_files is None:
        weights = source.path
        name = source.shown
    else:
        weights = mmproj_files.weights
        name = f"'{mmproj}'"
    vector_ids = {kind: form.vector_id for kind, form in forms.items()}
    try:
        tower = load_tower(weights, config, name, vector_ids, device, dtype, num_threads)
    except ImportError as error:  # a package that the tower's code needs
        log.warning("Images and sounds are not read: %s", str(error).strip().partition("\n")[0])
        return None
    reader = FileReader(forms, config, tower, limits)
    return Media(frozenset(forms), reader, tower, reader.vectors)
