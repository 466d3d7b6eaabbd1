"""Tests the routes of speech: what reaches the engine, and every form of the answers."""

import json
import warnings
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from openai.types import audio
from openai.types.audio.transcription_create_params import TranscriptionCreateParamsBase
from openai.types.audio.translation_create_params import TranslationCreateParams

from oaiserve.engine.request import TokenPrompt
from oaiserve.engine.types.pooling import Pooling
from oaiserve.facts.record import Outcome
from oaiserve.plugins.speech.api import SpeechAnswer
from oaiserve.plugins.speech.body import FIELDS
from oaiserve.plugins.speech.sound import SoundProcess
from oaiserve.plugins.speech.tokens import RATE, SpokenToken
from oaiserve.plugins.speech.transcript import clock
from oaiserve.routes.adaptations import HEADER
from tests.plugins.speech.spoken import IDS, at, timed, wav, window
from tests.routes.asking import answered, refused
from tests.routes.doubles import pools
from tests.serving import Served
from tests.world.serving import WorldServed

pytest.importorskip("av")

TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
SOUND = wav(2.0)
LONG = wav(40.0)
HELLO = window(*timed(" Hello world.", 0.0, 1.3), *timed(" Bye.", 1.3, 1.8))
AGAIN = window(*timed(" Again --> here.", 2.0, 5.0), language="<|de|>")


@pytest.fixture
def speech(served: Served) -> Served:
    served.engine.pooling = Pooling("transcribe", 0)
    served.engine.tokenizer.special_token_ids = IDS
    served.engine.script = pools(HELLO, AGAIN)
    return served


def send(served: Served, path: str = TRANSCRIPTIONS, sound: bytes = SOUND, **fields: Any) -> httpx.Response:
    return served.http.post(path, files={"file": ("speech.wav", sound)}, data=fields)


def prompts_of(served: Served) -> list[TokenPrompt]:
    return list(served.engine.submitted.get().prompts)


def text_before(prompt: TokenPrompt) -> list[int]:
    return [each for each in prompt.token_ids if each != IDS["<|endoftext|>"]]


def test_the_text_of_a_sound_is_the_answer(speech: Served) -> None:
    answer = answered(send(speech, model="org/demo"))
    assert answer == {"text": "Hello world. Bye.", "usage": {"type": "duration", "seconds": 2.0}}
    (prompt,) = prompts_of(speech)
    assert text_before(prompt) == [IDS["<|startoftranscript|>"], IDS["<|transcribe|>"]]
    assert len(prompt.token_ids) == 2 + 100  # A second of sound counts as 50 tokens.
    assert len(prompt.media[0].content) == 2 * 2 * RATE


def test_the_prompt_has_the_wishes_of_the_client(speech: Served) -> None:
    answered(send(speech, language="de-AT", prompt="Zapfl", temperature="0.5", seed="7"))
    request = speech.engine.submitted.get()
    (prompt,) = request.prompts
    before = [IDS["<|startofprev|>"], *map(ord, " Zapfl"), IDS["<|startoftranscript|>"], IDS["<|de|>"]]
    assert text_before(prompt) == [*before, IDS["<|transcribe|>"]]
    assert (request.params.temperature, request.params.seed) == (0.5, 7)


def test_translations_have_their_own_task(speech: Served) -> None:
    answer = answered(send(speech, TRANSLATIONS, response_format="verbose_json"))
    (prompt,) = prompts_of(speech)
    assert text_before(prompt)[-1] == IDS["<|translate|>"]
    assert (answer["task"], answer["language"]) == ("translate", "en")


def test_verbose_json_has_segments_of_all_windows(speech: Served) -> None:
    answer = answered(send(speech, sound=LONG, response_format="verbose_json"))
    assert audio.TranscriptionVerbose.model_validate(answer)
    assert answer["text"] == "Hello world. Bye. Again --> here."
    assert (answer["language"], answer["duration"], "words" in answer) == ("en", 40.0, False)
    first, second, third = answer["segments"]
    assert (first["start"], first["end"], first["text"]) == (0.0, 1.3, " Hello world.")
    assert (second["start"], second["end"], second["id"]) == (1.3, 1.8, 1)
    assert third["start"] == pytest.approx(third["seek"] / 100 + 2.0, abs=0.01)
    assert (first["avg_logprob"], first["no_speech_prob"], first["temperature"]) == (-0.25, 0.125, 0.0)
    assert len(prompts_of(speech)) == 2


def test_words_have_times(speech: Served) -> None:
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    answer = answered(send(speech, **fields))
    assert [word["word"] for word in answer["words"]] == ["Hello", "world.", "Bye."]
    assert [(word["start"], word["end"]) for word in answer["words"]] == [(0.0, 0.6), (0.6, 1.3), (1.3, 1.8)]
    assert len(answer["segments"]) == 2
    assert speech.engine.submitted.get().params.pooled_as == "token_times"
    alone = answered(send(speech, response_format="verbose_json", timestamp_granularities="word"))
    assert "segments" not in alone


def test_words_of_a_language_without_blanks_are_tokens(speech: Served) -> None:
    speech.engine.script = pools(window(*timed("ab", 0.0, 1.0), language="<|ja|>"))
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    assert [word["word"] for word in answered(send(speech, **fields))["words"]] == ["a", "b"]


def test_times_stay_within_the_sound(speech: Served) -> None:
    speech.engine.script = pools(
        window(at(1.0), SpokenToken(ord("a"), 1.0, 9.0, b"a"), SpokenToken(ord("b"), 9.0, 9.5, b"b"))
    )
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    answer = answered(send(speech, **fields))
    assert (answer["segments"][0]["end"], answer["words"][0]["end"]) == (2.0, 2.0)


def test_silence_has_no_text(speech: Served) -> None:
    speech.engine.script = pools(window())
    answer = answered(send(speech, response_format="verbose_json"))
    assert (answer["text"], answer["segments"]) == ("", [])


def test_text_and_subtitles(speech: Served) -> None:
    assert send(speech, response_format="text").text == "Hello world. Bye.\n"
    srt = send(speech, sound=LONG, response_format="srt")
    assert srt.headers["content-type"].startswith("application/x-subrip")
    cues = srt.text.split("\n\n")
    assert cues[0] == "1\n00:00:00,000 --> 00:00:01,300\nHello world."
    assert cues[2].endswith("\nAgain -> here.")
    vtt = send(speech, response_format="vtt").text
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.300\nHello world.\n\n00:00:01.300")


def test_a_clock_has_hours() -> None:
    assert (clock(3725.0049), clock(0.9996, ",")) == ("01:02:05.005", "00:00:01,000")


def test_a_stream_has_the_text_of_each_window_in_order(speech: Served) -> None:
    events = send(speech, sound=LONG, stream="true").text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first, second, done = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [first["delta"], second["delta"]] == ["Hello world. Bye.", " Again --> here."]
    assert (done["type"], done["text"]) == ("transcript.text.done", "Hello world. Bye. Again --> here.")
    assert done["usage"]["type"] == "tokens"


def test_the_sdk_reads_answers_and_streams(speech: Served) -> None:
    with speech.sdk() as sdk:
        create = sdk.audio.transcriptions.create
        arguments: dict[str, Any] = {"file": ("a.wav", SOUND), "model": "org/demo"}
        assert create(**arguments).text == "Hello world. Bye."
        words = create(**arguments, response_format="verbose_json", timestamp_granularities=["word"]).words
        assert [word.word for word in words or []] == ["Hello", "world.", "Bye."]
        assert create(**arguments, response_format="srt").startswith("1\n00:00")
        kinds = [event.type for event in create(**arguments, stream=True)]
        assert kinds == ["transcript.text.delta", "transcript.text.done"]
        with warnings.catch_warnings():  # Newer SDKs say that OpenAI will close its own route.
            warnings.simplefilter("ignore", DeprecationWarning)
            assert sdk.audio.translations.create(**arguments).text == "Hello world. Bye."


@pytest.mark.parametrize(
    "files",
    [
        {"file": ("ab12.wav", SOUND), "model": (None, "org/demo")},  # Open WebUI, from routers/audio.py
        {
            "model": (None, "org/demo"),
            "language": (None, "de"),
            "file": ("ab12.mp3", SOUND),
        },  # with its user's language
        {  # Home Assistant's integration openai_conversation, by the official package
            "model": (None, "org/demo"),
            "language": (None, "de"),
            "prompt": (None, "A conversation with a smart home."),
            "response_format": (None, "json"),
            "file": ("a.wav", SOUND, "audio/wav"),
        },
        {  # an integration of others for Home Assistant
            "file": ("whisper_audio.wav", SOUND, "audio/wav"),
            "model": (None, "org/demo"),
            "language": (None, "en"),
            "prompt": (None, ""),
            "temperature": (None, "0"),
            "response_format": (None, "json"),
        },
    ],
)
def test_forms_of_other_programs_are_read(speech: Served, files: Any) -> None:
    answer = speech.http.post(TRANSCRIPTIONS, files=files)
    assert answered(answer)["text"] == "Hello world. Bye."
    assert HEADER not in answer.headers


def test_a_client_that_leaves_ends_the_process_of_its_file(
    speech: WorldServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[SoundProcess] = []
    monkeypatch.setattr(SoundProcess, "close", lambda process: closed.append(process))
    monkeypatch.setattr(speech.engine, "run_in_turns", lambda work, **_: Future())
    request = httpx.Request("POST", f"http://localhost{TRANSCRIPTIONS}", files={"file": SOUND})
    with speech.connect() as client:
        lines = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        client.sendall(f"POST {TRANSCRIPTIONS} HTTP/1.1\r\n{lines}\r\n".encode() + request.read())
        speech.settle()
        assert not closed
    speech.settle()
    assert len(closed) == 1


def test_a_key_reserves_the_seconds_of_sound(speech: Served) -> None:
    answered(send(speech, sound=LONG, prompt="ab"))
    request = speech.engine.submitted.get()
    assert request.num_bytes == 2 * 40 * RATE
    answer: Any = SpeechAnswer(None, None, request, None)  # type: ignore[arg-type]
    # Each of the two windows is rounded up, and has the text before the speech.
    assert 0 <= answer._most_tokens() - (40 * 50 + 2 * 6) <= 1


def test_the_record_has_the_sound(speech: Served) -> None:
    answered(send(speech))
    record = speech.telemetry.records.get()
    assert (record.operation, record.outcome) == ("transcription", Outcome.FINISHED)
    assert record.params["sound_seconds"] == 2.0
    assert record.client is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": "diarized_json"}, "response_format", "must be one of json, text"),
        ({"temperature": "2"}, "temperature", "from 0 to 1"),
        ({"temperature": "nan"}, "temperature", "from 0 to 1"),
        ({"language": "tlh"}, "language", "must be a language of the model"),
        ({"language": "endoftext"}, "language", "must be a language of the model"),
        ({"stream": "true", "response_format": "srt"}, "stream", "needs the response_format"),
        ({"stream": "perhaps"}, "stream", "must be one of"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "needs the response_format verbose_json"),
        ({"timestamp_granularities[]": "letter"}, "timestamp_granularities", "must be one of word, segment"),
        ({"include[]": "logprobs"}, "include", "no log-probabilities"),
        ({"known_speaker_names[]": "Ann"}, "known_speaker_names", "does not tell speakers apart"),
        ({"seed": "-1"}, "seed", "must be an integer"),
    ],
)
def test_wrong_fields_are_refused(speech: Served, fields: dict[str, str], param: str, says: str) -> None:
    refused(send(speech, **fields), param, says)


def test_wrong_forms_are_refused(speech: Served) -> None:
    refused(speech.http.post(TRANSCRIPTIONS, files={"sound": ("a.wav", SOUND)}), "file", "must have the field 'file'")
    refused(speech.http.post(TRANSCRIPTIONS, json={"file": "a"}), None, "must be multipart/form-data")
    headers = {"content-type": "multipart/form-data"}
    refused(speech.http.post(TRANSCRIPTIONS, content=b"x", headers=headers), "file", "no boundary")
    headers = {"content-type": "multipart/form-data; boundary=b"}
    refused(speech.http.post(TRANSCRIPTIONS, content=b"--b\r\nx", headers=headers), "file", "cannot be read")
    refused(send(speech, sound=b"no sound"), "file", "the sound must be FLAC")


def test_the_model_must_be_one_for_speech(served: Served) -> None:
    refused(send(served), "model", "generates text", code="wrong_task")
    refused(send(served, model="other"), "model", "other", status=404)


@pytest.mark.parametrize(
    ("params", "name"), [(TranscriptionCreateParamsBase, "chunking_strategy"), (TranslationCreateParams, "model")]
)
def test_each_field_of_the_official_package_is_in_the_table(params: type, name: str) -> None:
    fields = params.__annotations__
    assert name in fields
    assert fields.keys() - FIELDS.keys() == set()
    for field in FIELDS.values():
        assert sum(map(bool, (field.meaning, field.refused, field.left_out))) == 1


def test_fields_that_are_left_out_are_named(speech: Served) -> None:
    answer = send(speech, keywords="a", chunking_strategy="auto", languages="en", other="1")
    assert answer.headers[HEADER] == (
        "keywords: is left out: put them into 'prompt'; languages: is left out: use 'language'; "
        "form: unknown fields are left out"
    )
