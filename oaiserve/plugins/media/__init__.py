"""Images and sounds in prompts: from clients' files to the vectors that a multimodal model reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts

if TYPE_CHECKING:
    from pathlib import Path

    from oaiserve.engine.encoder import Media
    from oaiserve.engine.start.request import StartRequest


def _media(request: StartRequest, mmproj: Path | None) -> Media | None:
    with request.times.part("import of transformers"):
        from oaiserve.plugins.media.model.load import load_media
    with request.times.part("tower"):
        return load_media(request, mmproj)


plugin = Plugin(name="media", inner=InnerParts(media=_media))
