"""Whisper base writes down what espeak-ng says, in three languages, and when each word is said."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oaiserve.engine.request import Pooled, Request, SamplingParams, TokenPrompt
from oaiserve.engine.types.media import MediaFile
from oaiserve.plugins.speech import plugin
from oaiserve.plugins.speech.sound import SoundProcess
from oaiserve.plugins.speech.tokens import SAMPLES_PER_TOKEN, WindowText
from oaiserve.plugins.speech.transcript import Transcript, Vocabulary
from tests.engine.doubles import SimulatedEngine
from tests.real.artefacts import WHISPER_BASE, fetched
from tests.real.whisper_base import write_whisper_base

pytest.importorskip("av")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="apt-get install espeak-ng"),
]
# By language: the voice, the text, and the most words that may be wrong. The voices are machines'.
SPOKEN = {
    "en": (
        "en-us",
        "The committee will meet on Thursday morning to discuss the new budget. Several members have asked for a "
        "longer debate about schools and hospitals.",
        1,
    ),
    "de": ("de", "Morgen fahren wir mit dem Zug nach Berlin und besuchen unsere Freunde.", 2),
    "es": ("es", "Mi hermana trabaja en un hospital cerca del río. Mañana vamos a comer con nuestros amigos.", 1),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = write_whisper_base([fetched(part) for part in WHISPER_BASE], tmp_path_factory.mktemp("whisper"))
    with SimulatedEngine.from_pretrained(folder, ways=plugin.inner.starts) as started:
        yield started


def words(text: str) -> list[str]:
    return re.sub(r"[^\w\s]", "", text.lower()).split()


def word_errors(expected: list[str], written: list[str]) -> int:
    """Return how many words are wrong, missing or too many."""
    row = list(range(len(written) + 1))
    for number, word in enumerate(expected, start=1):
        before = row
        row = [number]
        for index, other in enumerate(written, start=1):
            row.append(min(before[index] + 1, row[index - 1] + 1, before[index - 1] + (word != other)))
    return row[-1]


@pytest.mark.parametrize("language", SPOKEN)
def test_speech_is_written_down(engine: Any, language: str, tmp_path: Path) -> None:
    voice, text, most_errors = SPOKEN[language]
    path = tmp_path / "speech.wav"
    subprocess.run(["espeak-ng", "-v", voice, "-s", "140", "-w", str(path), text], check=True)
    samples = SoundProcess().samples(path.read_bytes())
    ids = engine.tokenizer.special_token_ids
    rows = [ids["<|endoftext|>"]] * -(-len(samples) // SAMPLES_PER_TOKEN)
    before = [ids["<|startoftranscript|>"], ids["<|transcribe|>"]]
    prompt = TokenPrompt([*before, *rows], "file", (MediaFile("audio", samples.tobytes()),))
    params = SamplingParams(max_tokens=0, temperature=0.0, pooled_as="token_times")
    (window,) = [each for each in engine.stream(Request(language, (prompt,), params)) if isinstance(each, Pooled)]
    seconds = len(samples) / 16_000
    transcript = Transcript(Vocabulary(engine.tokenizer.special_token_ids), "transcribe", seconds)
    transcript.add(WindowText.read(window.vector), 0.0, seconds)
    assert word_errors(words(text), words(transcript.text)) <= most_errors, transcript.text
    assert transcript.language == language
    starts = [word.start for word in transcript.words]
    assert len(starts) == len(transcript.text.split())
    assert starts == sorted(starts)
    # The words are spread over the speech.
    assert starts[0] < 1.0
    assert seconds - 2.0 < starts[-1] < seconds
