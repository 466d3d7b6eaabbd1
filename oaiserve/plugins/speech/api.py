"""/v1/audio/transcriptions and /v1/audio/translations: the text of a sound.

The sound is cut into windows. Each one is a prompt of one request to the engine, which encodes and decodes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HTTPRequest
from starlette.types import Receive, Scope, Send

from oaiserve.engine.request import (
    Pooled,
    PromptDone,
    PromptProgress,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
    Usage,
)
from oaiserve.engine.types.media import MediaFile
from oaiserve.http.fair_turns import LONG, Work
from oaiserve.plugins.shared.forms import read_form
from oaiserve.plugins.speech.body import SpeechBody, Task, parameters, read_body
from oaiserve.plugins.speech.metrics import Sounds
from oaiserve.plugins.speech.sound import SoundProcess, windows_of
from oaiserve.plugins.speech.tokens import RATE, SAMPLES_PER_TOKEN, WindowText
from oaiserve.plugins.speech.transcript import END, SpeechText, Transcript, Vocabulary
from oaiserve.routes.answer import sse
from oaiserve.routes.answer.common_shape import encode
from oaiserve.routes.answer.respond import Answer
from oaiserve.routes.answer.shape import ACTIVITY_SECONDS, Timings
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.read import Intake
from oaiserve.routes.intake.receive import HeldBytes, check_type, read_into
from oaiserve.routes.intake.turns import in_turns
from oaiserve.routes.operation import ERRORS_OF_BODIES, Operation
from oaiserve.routes.serving import Serving, serving_of

# Limit for a client's text before the speech, as in openai's Whisper. The last tokens of a longer one count.
MOST_PROMPT_TOKENS = 223
START = "<|startoftranscript|>"
BEFORE = "<|startofprev|>"
_MEDIA_TYPES = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}


class TextTokens(msgspec.Struct):
    """The tokens of the sound, of which a second has 50, and of the prompt."""

    audio_tokens: int
    text_tokens: int


class StreamUsage(msgspec.Struct):
    """The tokens of a streamed text."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: TextTokens
    type: Literal["tokens"] = "tokens"


class SpeechEvent(msgspec.Struct):
    """The text of the next part of the sound, or all of it."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    usage: StreamUsage | UnsetType = UNSET


def _operation(task: Task, summary: str) -> Operation:
    return Operation(
        summary=summary,
        group="Speech",
        form=parameters(task),
        answer=SpeechText,
        event=SpeechEvent,
        alternatives=tuple(_MEDIA_TYPES[name].partition(";")[0] for name in ("text", "srt", "vtt")),
        errors=ERRORS_OF_BODIES,
    )


@_operation("transcribe", "The text of a sound, in its own language.")
async def transcriptions(scope: Scope, receive: Receive, send: Send) -> None:
    await _serve(scope, receive, send, "transcribe")


@_operation("translate", "The text of a sound, in English.")
async def translations(scope: Scope, receive: Receive, send: Send) -> None:
    await _serve(scope, receive, send, "translate")


async def _serve(scope: Scope, receive: Receive, send: Send, task: Task) -> None:
    http = HTTPRequest(scope, receive)
    serving = serving_of(http)
    content = bytearray()
    with HeldBytes(serving.received_bytes, http.state.client) as held, closing(SoundProcess()) as process:
        await read_into(content, http, held, serving.body_limit)
        check_type(http, "multipart/form-data")
        work = _answer(serving, http.state.exchange, http.headers["content-type"], content, task, process)
        answer, sound_seconds, decode_ns = await in_turns(http, work, len(content))
    sounds: Sounds = http.app.state.sounds
    sounds.sound_seconds += sound_seconds
    sounds.decode_seconds += decode_ns / 1e9
    await answer(scope, receive, send)


def _answer(
    serving: Serving, exchange: Exchange, content_type: str, content: bytearray, task: Task, process: SoundProcess
) -> Work[tuple[Answer, float, int]]:
    """Return the answer to a form, with the length of its sound, and the time for which that was decoded."""
    body = read_body(read_form(content_type, content), task, exchange.adaptations.note)
    content.clear()
    exchange.is_streaming = body.stream
    exchange.ids = None  # A gateway cannot continue the stream on another server.
    exchange.requested_model = body.model
    exchange.adapter = serving.check_model(body.model)
    names = serving.accepted_names_of(exchange.adapter)
    if exchange.use is not None:
        exchange.use.key.check_model(*names)
    serving.check_task("transcribe")
    tokenizer = serving.engine.tokenizer
    before = yield from _prompt(body, serving)
    yield LONG
    began_ns = serving.runtime.clock_ns()
    samples = process.samples(body.sound)
    decode_ns = serving.runtime.clock_ns() - began_ns
    windows = windows_of(samples)
    sound_seconds = len(samples) / RATE
    end_id = tokenizer.special_token_ids[END]
    prompts = tuple(
        TokenPrompt(
            [*before, *[end_id] * -(-len(each) // SAMPLES_PER_TOKEN)],
            "file",
            (MediaFile("audio", each.tobytes(), param="file"),),
        )
        for _, each in windows
    )
    exchange.params = {
        "response_format": body.response_format,
        "num_inputs": len(windows),
        "sound_seconds": round(sound_seconds, 2),
    }
    intake = Intake(serving, exchange, b"", body, names[0], "transcript-")
    intake.num_bytes = samples.nbytes
    request = intake.pooling_request(prompts, "token_times" if "word" in body.timestamp_granularities else "text")
    params = replace(request.params, temperature=body.temperature, seed=body.seed)
    transcript = Transcript(Vocabulary(tokenizer.special_token_ids), task, sound_seconds)
    places = [(start / RATE, (start + len(each)) / RATE) for start, each in windows]
    shape = SpeechShape(body, transcript, places, len(before))
    answer = SpeechAnswer(
        serving,
        exchange,
        replace(request, params=params),
        shape.whole,
        shape if body.stream else None,
        media_type=_MEDIA_TYPES[body.response_format],
        pooled=shape.pooled,
    )
    return answer, sound_seconds, decode_ns


def _prompt(body: SpeechBody, serving: Serving) -> Work[list[int]]:
    """Return the tokens before the text. Raises InvalidRequest for a language that the model doesn't know."""
    tokenizer = serving.engine.tokenizer
    ids = tokenizer.special_token_ids
    prompt = []
    if body.prompt:
        text = TextPrompt(f" {body.prompt}", add_special_tokens=False)
        encoded = yield from tokenizer.encode_in_pieces(text)
        prompt = [ids[BEFORE], *encoded[-MOST_PROMPT_TOKENS:]]
    prompt.append(ids[START])
    if body.language is not None:
        name = f"<|{body.language.lower().partition('-')[0]}|>"  # The region of en-GB makes no difference.
        if name not in ids or len(name) > len("<|yue|>"):
            raise invalid("language", f"must be a language of the model, such as en, got {show(body.language)}")
        prompt.append(ids[name])
    task = f"<|{body.task}|>"
    if task in ids:  # A model for English alone may have no tasks.
        prompt.append(ids[task])
    return prompt


@dataclass(frozen=True, slots=True)
class SpeechAnswer(Answer):
    """An answer whose request is counted by its seconds of sound."""

    def _most_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.request.prompts if isinstance(prompt, TokenPrompt))


class SpeechShape:
    """Renders the text of windows: of each one, once all before it are there."""

    activity_seconds = ACTIVITY_SECONDS
    is_numbered = False

    def __init__(
        self, body: SpeechBody, transcript: Transcript, places: Sequence[tuple[float, float]], num_before: int
    ) -> None:
        """`places` are the windows' starts and ends in the sound. Each prompt has `num_before` tokens before it."""
        self._body = body
        self._transcript = transcript
        self._places = places
        self._num_text_tokens = num_before * len(places)
        self._early: dict[int, Pooled] = {}  # results of windows before which others are missing
        self._num_done = 0

    def begun(self, _event: PromptProgress) -> bytes:
        return b""

    def progress(self, _event: PromptProgress) -> bytes:
        return sse.comment("the sound is being read")

    def activity(self) -> bytes:
        return _event(SpeechEvent("transcript.text.delta", delta=""))

    def prompt(self, _event: PromptDone) -> Iterable[bytes]:
        return ()

    def delta(self, _chunk: TokenChunk) -> bytes:
        return b""

    def pooled(self, event: Pooled) -> Iterator[bytes]:
        self._early[event.index] = event
        while (ready := self._early.pop(self._num_done, None)) is not None:
            is_first = not self._transcript.segments
            text = self._transcript.add(WindowText.read(ready.vector), *self._places[self._num_done])
            self._num_done += 1
            if is_first:
                text = text.lstrip()
            if text:
                yield _event(SpeechEvent("transcript.text.delta", delta=text))

    def finished(self, usage: Usage, _timings: Timings, /) -> Iterable[bytes]:
        details = TextTokens(usage.audio_tokens, self._num_text_tokens)
        num_out = self._transcript.num_tokens
        of_stream = StreamUsage(usage.prompt_tokens, num_out, usage.prompt_tokens + num_out, details)
        done = SpeechEvent("transcript.text.done", text=self._transcript.text, usage=of_stream)
        return (_event(done), sse.DONE)

    def failed(self, error: Mapping[str, Any]) -> bytes:
        return sse.event(encode(error)) + sse.DONE

    def whole(self, _prompts: Sequence[PromptDone], windows: Sequence[Any], _usage: Usage) -> Iterator[bytes]:
        transcript = self._transcript
        for window, place in zip(windows, self._places, strict=True):
            transcript.add(WindowText.read(window.vector), *place)
        match self._body.response_format:
            case "json":
                yield encode(transcript.plain())
            case "verbose_json":
                yield encode(transcript.verbose(self._body.timestamp_granularities))
            case "text":
                yield f"{transcript.text}\n".encode()
            case "srt":
                yield transcript.srt().encode()
            case "vtt":
                yield transcript.vtt().encode()


def _event(event: SpeechEvent) -> bytes:
    return sse.event(encode(event))
