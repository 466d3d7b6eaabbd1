"""Starts what reads the images of a multimodal model. Its text model starts by any of the usual ways."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from oaiserve.engine.encoder import Media
from oaiserve.engine.model.checkpoints.wrapper import text_config
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.device import select_device
from oaiserve.engine.model.media.families import IMAGES
from oaiserve.engine.model.media.reader import ImageReader
from oaiserve.engine.model.media.tower import load_tower
from oaiserve.engine.model.model_config import select_dtype
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.load import config_of
from oaiserve.engine.start.request import StartRequest
from oaiserve.facts.media import MediaLimits
from oaiserve.files.load_errors import reported

log = logging.getLogger(__name__)


def load_media(request: StartRequest) -> Callable[[ServedModel], ServedModel]:
    """Load the tower of a multimodal model, and return what joins it to the model when that has started."""
    source, options = request.source, request.options
    folder = source.path
    with reported(f"No model could be loaded from {source.shown}"):
        config = config_of(source)
    text = text_config(config)
    if config.model_type not in IMAGES or text is None:
        log.warning("Images are not read by a model of the type %s: it is served for text alone", config.model_type)
        return lambda served: served
    device = select_device(options.device)
    dtype = select_dtype(options.dtype, text, device, is_gguf=False, for_tensor_cores=True)
    num_threads = options.cpu_threads or default_threads() if device.type == "cpu" else None
    limits = MediaLimits(
        options.max_media_bytes, options.max_image_pixels, options.max_audio_seconds, options.media_cache
    )
    try:
        tower = load_tower(folder, config, source.shown, device, dtype, num_threads)
        reader = ImageReader(folder, config, request.tokenizer, tower, limits)
    except ImportError as error:  # Pillow, or what the family's image processor needs
        log.warning("Images are not read: %s", str(error).strip().partition("\n")[0])
        return lambda served: served
    media = Media(frozenset({"image"}), reader, tower, reader.vectors)
    return lambda served: replace(served, media=media)
