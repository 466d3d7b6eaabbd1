"""Each reason for which a prompt is read again, over HTTP, on each route, by its header, its record and its wire."""

from array import array
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

from oaiserve.engine.encoder import Media
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.engine.types.adapters import AdapterTable
from oaiserve.engine.types.media import Encoded, MediaFile, MediaKind, Medium, Prepared, PromptMedia, Vectors
from oaiserve.facts.record import ReadAgain, RequestRecord
from tests.engine.doubles import ScriptedRunner, letter_id
from tests.engine.text.tokenizers_for_tests import byte_level
from tests.routes.asking import PARAMETERS
from tests.serving import Served
from tests.world.serving import Place, reading

Body = Mapping[str, Any]

# Its beginning has some variables and, in one style, the number of the messages, which nothing in a request names.
TEMPLATE = """\
{{ reasoning_effort }}{{ verbosity }}{{ style }}{% if style %}{{ messages | length }}{% endif -%}
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{% for part in message.content %}{{ part.text if part.type == "text" else "<image>" }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOKENIZER = Tokenizer(
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>", chat_template=TEMPLATE)
)
SYSTEM = "You are a helpful assistant who answers in one sentence, at 12:00."
QUESTION = {"role": "user", "content": "What is the capital of France, and how many people live there?"}
TURNS = (QUESTION, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Spain?"})
OTHER_TURNS = ({**QUESTION, "content": QUESTION["content"].replace("France", "Norway")}, *TURNS[1:])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


class Pictures:
    """Reads any bytes as an image of one token."""

    placeholders: Mapping[MediaKind, str] = {"image": "<image>"}

    def checked(self, files: Sequence[MediaFile]) -> list[MediaFile]:
        return list(files)

    def prepare(self, file: MediaFile, salt: str, *, only_text: bool = False) -> Prepared:
        return Prepared(Medium("image", repr(file.content).encode(), 1, {}), "<image>")

    def placed(self, token_ids: list[int], prepared: Sequence[Prepared]) -> PromptMedia:
        return PromptMedia(tuple(one.medium for one in prepared), array("i", range(len(prepared))))

    def pieces(self, medium: Medium) -> Iterator[Encoded | None]:
        yield Encoded(SimpleNamespace(nbytes=1))


class Turn(NamedTuple):
    record: RequestRecord
    header: str | None
    answer: dict[str, Any]


class Route(NamedTuple):
    """How a route names the parts of a conversation, and an earlier answer."""

    path: str
    system: str
    turns: str
    before: str  # the object with the id of the earlier answer
    id_field: str

    def ask(self, served: Served, system: str = SYSTEM, turns: object = TURNS, before: str = "", **more: Any) -> Turn:
        body: dict[str, Any] = {"model": "org/demo", "max_tokens": 1, self.turns: turns}
        if self.path == "/v1/chat/completions":
            body[self.turns] = [{"role": "system", "content": system}, *turns]  # type: ignore[misc]
        elif self.path != "/v1/completions":
            body[self.system] = system
        if self.path == "/v1/responses":
            body["max_output_tokens"] = body.pop("max_tokens")
        if before and self.before:
            body[self.before] = {self.id_field: before}
        answer = served.http.post(self.path, json=body | more)
        assert answer.status_code == 200, answer.text
        record = served.telemetry.next_record()
        return Turn(record, answer.headers.get("x-oaiserve-read-again"), answer.json())


CHAT = Route("/v1/chat/completions", "", "messages", "", "")
COMPLETIONS = Route("/v1/completions", "", "prompt", "", "")
MESSAGES = Route("/v1/messages", "system", "messages", "diagnostics", "previous_message_id")
RESPONSES = Route("/v1/responses", "instructions", "input", "prompt_cache_options", "comparison_response_id")
WITH_TURNS = [
    pytest.param(CHAT, id="chat"),
    pytest.param(MESSAGES, id="messages", marks=pytest.mark.plugin("messages")),
    pytest.param(RESPONSES, id="responses", marks=pytest.mark.plugin("responses")),
]
ALL = [*WITH_TURNS, pytest.param(COMPLETIONS, id="completions")]


def tool_of(route: Route) -> Body:
    function = {"name": "search", "description": "Search.", "parameters": PARAMETERS}
    if route is CHAT:
        return {"type": "function", "function": function}
    if route is RESPONSES:
        return {"type": "function", **function}
    return {"name": "search", "description": "Search.", "input_schema": PARAMETERS}


def image_of(route: Route, content: bytes) -> list[Body]:
    data = b64encode(content).decode()
    url = f"data:image/png;base64,{data}"
    image = {
        CHAT: {"type": "image_url", "image_url": {"url": url}},
        RESPONSES: {"type": "input_image", "image_url": url},
        MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    }
    text = {"type": "input_text" if route is RESPONSES else "text", "text": QUESTION["content"]}
    return [{"role": "user", "content": [image[route], text]}]


def effort_of(route: Route, effort: str) -> dict[str, Any]:
    if route is CHAT:
        return {"reasoning_effort": effort}
    return {"reasoning": {"effort": effort}} if route is RESPONSES else {"output_config": {"effort": effort}}


def changed(route: Route, reason: ReadAgain) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what differs between two requests, as arguments of `ask`."""
    style = {"chat_template_kwargs": {"style": "counted"}}
    return {
        ReadAgain.MODEL: ({}, {"model": "tuned"}),
        ReadAgain.SALT: ({}, {"cache_salt": f"another of {route.path}"}),
        ReadAgain.TOOLS: ({}, {"tools": [tool_of(route)]}),
        ReadAgain.SYSTEM: ({}, {"system": SYSTEM.replace("12:00", "12:01")}),
        ReadAgain.OPTIONS: (effort_of(route, "low"), effort_of(route, "high")),
        ReadAgain.MESSAGE: ({}, {"turns": OTHER_TURNS}),
        ReadAgain.IMAGE: tuple({"turns": image_of(route, content)} for content in (b"one", b"two")),
        ReadAgain.TEXT: ({"turns": TURNS[:1], **style}, style),
    }[reason]  # type: ignore[return-value]


CHANGES = [
    *(ReadAgain.MODEL, ReadAgain.SALT, ReadAgain.TOOLS, ReadAgain.SYSTEM, ReadAgain.OPTIONS, ReadAgain.MESSAGE),
    *(ReadAgain.IMAGE, ReadAgain.TEXT),
]
OF_ANTHROPIC = {
    ReadAgain.MODEL: "model_changed",
    ReadAgain.TOOLS: "tools_changed",
    ReadAgain.SYSTEM: "system_changed",
    ReadAgain.MESSAGE: "messages_changed",
    ReadAgain.IMAGE: "messages_changed",
}
OF_OPENAI = {
    ReadAgain.MODEL: "model_changed",
    ReadAgain.SALT: "prompt_cache_key_changed",
    ReadAgain.TOOLS: "tools_changed",
    ReadAgain.OPTIONS: "reasoning_effort_changed",
}


def wire_of(route: Route, turn: Turn) -> str | None:
    """Return the reason in the answer; None: the cache had the prompt."""
    if route is MESSAGES:
        diagnostics = turn.answer["diagnostics"]
        return None if diagnostics is None else diagnostics["cache_miss_reason"]["type"]
    diagnostics = turn.answer["prompt_cache_diagnostics"]
    if diagnostics["type"] == "cache_miss":
        assert 0 < diagnostics["cache_missed_tokens"] <= turn.record.prompt_tokens
        return str(diagnostics["reason"])
    return None if diagnostics["type"] == "cache_hit" else diagnostics["type"]


def check(route: Route, turn: Turn, reason: ReadAgain) -> None:
    """Check that header, record and wire agree on a reason."""
    record = turn.record
    assert record.read_again_reason is reason
    assert turn.header == f"{record.read_again_tokens}; reason={reason}"
    assert 0 < record.read_again_tokens <= record.prompt_tokens - record.cached_tokens
    if route is MESSAGES:
        assert wire_of(route, turn) == OF_ANTHROPIC.get(reason, "unavailable")
    elif route is RESPONSES:
        is_change = reason in CHANGES
        assert wire_of(route, turn) == OF_OPENAI.get(reason, "input_changed" if is_change else "unavailable")


@pytest.fixture
def server(place: Place) -> Iterator[Served]:
    adapters = AdapterTable(lambda number, name, path: None, lambda number: None, {"layer": (1, 1)})
    pictures = Pictures()
    media = Media(frozenset(["image"]), pictures, pictures, Vectors(0))
    brace = letter_id("{")  # which any answer may begin with, also one with a schema
    runner = ScriptedRunner(lambda sequence: brace)
    with reading(place, runner=runner, tokenizer=TOKENIZER, adapters=adapters, media=media, kv_blocks=4096) as served:
        served.engine.load_adapter("tuned", Path("tuned"))
        yield served


@pytest.mark.parametrize("reason", CHANGES)
@pytest.mark.parametrize("route", WITH_TURNS)
def test_a_change_is_the_reason(server: Served, route: Route, reason: ReadAgain) -> None:
    of_first, of_second = changed(route, reason)
    salt = {"cache_salt": f"{route.path} {reason}"}  # so that no other test's prompt is in the cache
    first = route.ask(server, **salt | of_first)
    check(route, route.ask(server, before=first.answer["id"], **salt | of_second), reason)


@pytest.mark.parametrize("change", [{"model": "tuned"}, {"cache_salt": "another"}])
def test_a_text_for_another_model_or_salt_is_read_again(server: Served, change: dict[str, str]) -> None:
    text = f"Once upon a time there was a text of many letters for another {[*change]}."
    COMPLETIONS.ask(server, turns=text)
    turn = COMPLETIONS.ask(server, turns=text, **change)
    check(COMPLETIONS, turn, ReadAgain.MODEL if "model" in change else ReadAgain.SALT)


@pytest.mark.parametrize("route", ALL)
def test_an_evicted_prompt_is_read_again(place: Place, route: Route) -> None:
    with reading(place, kv_blocks=96) as served:
        turns = QUESTION["content"] if route is COMPLETIONS else TURNS
        before = route.ask(served, turns=turns)
        taker = COMPLETIONS.ask(served, turns="x" * 380)
        turn = route.ask(served, turns=turns, before=before.answer["id"])
    check(route, turn, ReadAgain.EVICTED)
    assert turn.record.reuse["evicted_for"] == taker.record.response_id


@pytest.mark.parametrize("route", ALL)
def test_without_a_cache_each_prompt_is_read_again(place: Place, route: Route) -> None:
    with reading(place, prefix_cache=False) as served:
        turns = QUESTION["content"] if route is COMPLETIONS else TURNS
        before = route.ask(served, turns=turns)
        turn = route.ask(served, turns=turns, before=before.answer["id"])
    check(route, turn, ReadAgain.OFF)


@pytest.mark.parametrize("route", ALL)
def test_a_state_that_was_not_kept_is_the_reason(place: Place, route: Route) -> None:
    with reading(place, num_states=4) as served:
        turns, longer = ("a" * 90, "a" * 60 + "b" * 60) if route is COMPLETIONS else (TURNS, TURNS[:1])
        before = route.ask(served, turns=turns)
        turn = route.ask(served, turns=longer, before=before.answer["id"])
    check(route, turn, ReadAgain.STATE)


# What these change is the answer, and nothing in the prompt of this template.
SETTINGS = {
    RESPONSES: {
        "text_format": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        "verbosity": {"text": {"verbosity": "low"}},
        "service_tier": {"service_tier": "flex"},
        "prompt_cache_key": {"prompt_cache_key": "another"},
    },
    MESSAGES: {
        "tool_choice": {"tool_choice": {"type": "none"}},
        "format": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "service_tier": {"service_tier": "standard_only"},
    },
}


@pytest.mark.parametrize(
    ("route", "setting"),
    [
        pytest.param(route, name, marks=pytest.mark.plugin(route.path[4:]))
        for route in SETTINGS
        for name in SETTINGS[route]
    ],
)
def test_a_setting_that_does_not_change_the_prompt_is_no_reason(server: Served, route: Route, setting: str) -> None:
    shared = {"cache_salt": f"{route.path} {setting}", "tools": [tool_of(route)]}
    before = route.ask(server, **shared)
    turn = route.ask(server, before=before.answer["id"], **shared | SETTINGS[route][setting])
    assert wire_of(route, turn) is None
    assert (turn.record.read_again_reason, turn.header) == (None, None)


@pytest.mark.plugin("responses")
def test_a_template_that_reads_the_verbosity_has_that_as_its_reason(server: Served) -> None:
    low, high = ({"chat_template_kwargs": {"verbosity": value}, "cache_salt": "verbosity"} for value in ("low", "high"))
    before = RESPONSES.ask(server, **low)
    turn = RESPONSES.ask(server, before=before.answer["id"], **high)
    assert turn.record.read_again_reason is ReadAgain.OPTIONS
    assert wire_of(RESPONSES, turn) == "verbosity_changed"
