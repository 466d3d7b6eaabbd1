"""The numbers of sounds, in addition to those of all requests."""

from __future__ import annotations

from dataclasses import dataclass

from oaiserve.facts.metric import metric

SOUND_SECONDS = metric("oaiserve_speech_sound_seconds_total", "Seconds of the sounds that clients have sent.")
DECODE_SECONDS = metric(
    "oaiserve_speech_decode_seconds_total", "Time for which sound files were decoded: a part of the phase `receive`."
)
METRICS = (SOUND_SECONDS, DECODE_SECONDS)


@dataclass(slots=True)
class Sounds:
    """Totals of one model, which the event loop counts."""

    sound_seconds: float = 0.0
    decode_seconds: float = 0.0
