"""The text of a sound, put together from its windows: segments and words with their times, and the forms of answers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.plugins.speech.tokens import NO_TIME, TOKENS_PER_SECOND, SpokenToken, WindowText

END = "<|endoftext|>"
NO_TIMESTAMPS = "<|notimestamps|>"
# Languages whose words are written without blanks between them. A token that is complete is a word.
_WITHOUT_BLANKS = ("zh", "ja", "th", "lo", "my", "yue")


class Segment(msgspec.Struct):
    """A part of the text between two times. The times are in seconds; `seek` is that of its window, in hundredths."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class Word(msgspec.Struct):
    """A word, and when it is spoken, in seconds."""

    word: str
    start: float
    end: float


class SoundDuration(msgspec.Struct):
    """The length of the sound, in seconds."""

    seconds: float
    type: Literal["duration"] = "duration"


class SpeechText(msgspec.Struct):
    """The text of the sound. With the response_format verbose_json, also the other fields: `segments` and `words` as
    `timestamp_granularities` asks for them, and `language` as a code, such as en."""

    text: str
    usage: SoundDuration
    task: Literal["transcribe", "translate"] | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    segments: list[Segment] | UnsetType = UNSET
    words: list[Word] | UnsetType = UNSET


class Vocabulary:
    """The tokens of a model's vocabulary that are no text, from the ids of its special ones."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._first_time_id = ids[NO_TIMESTAMPS] + 1
        self._names: dict[int, str] = {token_id: name for name, token_id in ids.items()}

    def language_of(self, token_id: int) -> str:
        return self._names.get(token_id, "<|en|>")[2:-2]

    def time_of(self, token: SpokenToken) -> float | None:
        """Return the time of a timestamp, or None for a token of text."""
        if token.token_id < self._first_time_id:
            return None
        return (token.token_id - self._first_time_id) / TOKENS_PER_SECOND


def text_of(tokens: Sequence[SpokenToken]) -> str:
    return b"".join(token.text for token in tokens).decode(errors="replace")


def compression_ratio(text: str) -> float:
    """Return how far zlib shrinks a text. One that repeats itself has a large ratio."""
    content = text.encode()
    return len(content) / len(zlib.compress(content))


class Transcript:
    """The text of a sound, window by window."""

    def __init__(self, vocabulary: Vocabulary, task: Literal["transcribe", "translate"], duration: float) -> None:
        self.task = task
        self.duration = duration
        self.segments: list[Segment] = []
        self.words: list[Word] = []
        self.language = ""
        self.num_tokens = 0
        self._vocabulary = vocabulary

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    def add(self, window: WindowText, start: float, end: float) -> str:
        """Add the next window, which is from `start` to `end` in the sound, and return its text."""
        self.language = self.language or self._vocabulary.language_of(window.language_id)
        self.num_tokens += len(window.tokens)
        first = len(self.segments)
        for since, until, tokens in self._parts(window.tokens):
            self.segments.append(self._segment(window, start, end, since, until, tokens))
            if tokens[0].start != NO_TIME:
                self.words += self._words(tokens, start, end)
        return "".join(segment.text for segment in self.segments[first:])

    def _parts(self, tokens: Sequence[SpokenToken]) -> Iterator[tuple[float, float | None, list[SpokenToken]]]:
        """Yield the texts between timestamps, each with its times. The last one may have no end."""
        since = 0.0
        texts: list[SpokenToken] = []
        for token in tokens:
            time = self._vocabulary.time_of(token)
            if time is None:
                texts.append(token)
                continue
            if texts:
                yield since, time, texts
            since = time
            texts = []
        if texts:
            yield since, None, texts

    def _segment(
        self,
        window: WindowText,
        start: float,
        end: float,
        since: float,
        until: float | None,
        tokens: Sequence[SpokenToken],
    ) -> Segment:
        text = text_of(tokens)
        return Segment(
            id=len(self.segments),
            seek=round(start * 100),
            start=round(min(start + since, end), 2),
            end=round(end if until is None else min(start + until, end), 2),
            text=text,
            tokens=[token.token_id for token in tokens],
            temperature=round(window.temperature, 2),
            avg_logprob=window.average_logprob,
            compression_ratio=compression_ratio(text),
            no_speech_prob=window.no_speech_probability,
        )

    def _words(self, tokens: Sequence[SpokenToken], start: float, end: float) -> Iterator[Word]:
        words: list[list[SpokenToken]] = []
        is_complete = True
        for token in tokens:
            begins = token.text.startswith(b" ") or (self.language in _WITHOUT_BLANKS and is_complete)
            if begins or not words:
                words.append([token])
            else:
                words[-1].append(token)
            is_complete = "\N{REPLACEMENT CHARACTER}" not in text_of(words[-1])
        for word in words:
            if text := text_of(word).strip():
                since = round(min(start + word[0].start, end), 2)
                yield Word(text, since, round(max(since, min(start + word[-1].end, end)), 2))

    # -- the forms of answers ------------------------------------------------------------------------------------------

    def plain(self) -> SpeechText:
        return SpeechText(self.text, self._usage)

    def verbose(self, granularities: Sequence[str]) -> SpeechText:
        return SpeechText(
            self.text,
            self._usage,
            self.task,
            "en" if self.task == "translate" else self.language,
            round(self.duration, 2),
            self.segments if "segment" in granularities else UNSET,
            self.words if "word" in granularities else UNSET,
        )

    @property
    def _usage(self) -> SoundDuration:
        return SoundDuration(round(self.duration, 2))

    def srt(self) -> str:
        return "".join(
            f"{number}\n{clock(each.start, ',')} --> {clock(each.end, ',')}\n{_cue(each.text)}\n\n"
            for number, each in enumerate(self.segments, start=1)
        )

    def vtt(self) -> str:
        cues = (f"{clock(each.start)} --> {clock(each.end)}\n{_cue(each.text)}\n\n" for each in self.segments)
        return "".join(("WEBVTT\n\n", *cues))


def _cue(text: str) -> str:
    """Return the text of a subtitle. An arrow would be read as times."""
    return " ".join(text.split()).replace("-->", "->")


def clock(seconds: float, point: str = ".") -> str:
    """Return a time in the form of subtitles, such as 00:01:02.500."""
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
