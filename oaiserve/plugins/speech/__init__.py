"""Speech to text: /v1/audio/transcriptions and /v1/audio/translations, and how Whisper models start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
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
    from oaiserve.plugins.shared.late import LateEndpoint
    from oaiserve.routes.door.accounting import accounted

    return [
        accounted(f"/v1/audio/{name}", LateEndpoint("oaiserve.plugins.speech.api", name), name.removesuffix("s"))
        for name in ("transcriptions", "translations")
    ]


def _starts() -> list[Way]:
    from oaiserve.plugins.shared.way_of_tasks import WayOfTasks

    return [
        WayOfTasks("to transcribe", ("transcribe",), "it transcribes no speech", "oaiserve.plugins.speech.model.load")
    ]


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    from oaiserve.plugins.speech.metrics import DECODE_SECONDS, SOUND_SECONDS, Sounds

    serving = app.state.serving
    if serving.task == "transcribe":
        import_module("oaiserve.plugins.speech.api")  # It takes too long for the first request.
    app.state.sounds = sounds = Sounds()
    show = serving.telemetry.show
    show(SOUND_SECONDS, lambda: {(): sounds.sound_seconds})
    show(DECODE_SECONDS, lambda: {(): sounds.decode_seconds})
    yield


plugin = Plugin(name="speech", routes=_routes, lifespan=_lifespan, metrics=METRICS, inner=InnerParts(starts=_starts))
