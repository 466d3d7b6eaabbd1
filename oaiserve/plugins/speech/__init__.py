"""Speech to text: /v1/audio/transcriptions and /v1/audio/translations, and how Whisper models start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugins.speech.metrics import METRICS

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from oaiserve.config import Config
    from oaiserve.engine.start.request import Way


def _routes(config: Config) -> list[Route]:
    from oaiserve.plugins.speech import api
    from oaiserve.routes.door.accounting import accounted

    return [
        accounted("/v1/audio/transcriptions", api.transcriptions, "transcription"),
        accounted("/v1/audio/translations", api.translations, "translation"),
    ]


def _starts() -> list[Way]:
    from oaiserve.plugins.speech.way import ToTranscribe

    return [ToTranscribe()]


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    from oaiserve.plugins.speech.metrics import DECODE_SECONDS, SOUND_SECONDS, Sounds

    app.state.sounds = sounds = Sounds()
    show = app.state.serving.telemetry.show
    show(SOUND_SECONDS, lambda: {(): sounds.sound_seconds})
    show(DECODE_SECONDS, lambda: {(): sounds.decode_seconds})
    yield


plugin = Plugin(name="speech", routes=_routes, lifespan=_lifespan, metrics=METRICS, inner=InnerParts(starts=_starts))
