"""Calls of strict tools obey their schemas in every dialect, however a model tries to write them; the rest is free."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from oaiserve.engine.grammars import grammar as compiled
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.grammars.parts import Leads, PartsConstraint
from oaiserve.engine.request import Grammar, SamplingParams
from oaiserve.engine.text.detokenize import TokenTable
from oaiserve.routes.chat.answer_grammar import forced_schema
from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.hermes import HERMES
from oaiserve.routes.dialects.reasoning import THINK, ReasoningMode, ThinkingParser
from tests.engine.grammars.plain import allowed_ids
from tests.engine.text.tokenizers_for_tests import byte_level
from tests.plugins.dialects.known import FAMILIES
from tests.routes.dialects.reading import Read, own_form, read, segments_of

FREE = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMES = ("get", "get_weather", "no.args")  # names of strict tools; one begins like another
MOST_TOKENS = 500


class Model:
    """A model that wants to write a text, and draws at random where it may not."""

    def __init__(self, family: CallFamily, strict: dict[str, Any], *, has_special: bool) -> None:
        """With `has_special`, the tags of the family are special tokens."""
        self.backend = byte_level()
        tags = [*family.parser.tags, *family.parser.hidden_tags] if has_special else []
        tags = [tag for tag in dict.fromkeys(tags) if tag == tag.strip() and tag.startswith(("<", "["))]
        self.backend.add_special_tokens(tags)
        self.eos = self.backend.token_to_id("<|im_end|>")
        self.size = self.backend.get_vocab_size()
        special_ids = {tag: self.backend.token_to_id(tag) for tag in tags}
        schemas = {name: forced_schema(schema) for name, schema in strict.items()}
        self.leads, text = family.strict_grammar(schemas, special_ids)
        grammars = Grammars(self.backend, vocab_size=self.size, eos_token_ids=frozenset([self.eos]))
        self.compiled = grammars.compile(Grammar("lark_with_schemas", text, "tools", leads=self.leads))
        self.num_masks = 0

    def constraint(self) -> PartsConstraint:
        ends = frozenset([self.eos])
        table = TokenTable(self.backend)
        leads = Leads(self.leads, table, frozenset())
        params = SamplingParams()
        return PartsConstraint(leads, self.compiled.matcher, params, thinking=None, eos_token_ids=ends, stop_ids=ends)

    def write(self, text: str, rng: random.Random) -> tuple[str, bool]:
        """Return the answer, and whether it is cut."""
        constraint = self.constraint()
        wanted = self.backend.encode(text, add_special_tokens=False).ids
        closing = self.backend.encode('}],": )</>', add_special_tokens=False).ids
        words = np.zeros(-(-self.size // 32), np.uint32)
        written: list[int] = []
        while len(written) < MOST_TOKENS:
            if constraint.is_free:
                token_id = wanted.pop(0) if wanted else self.eos
            else:
                self.num_masks += 1
                constraint.fill_masks(words[None], len(written), ())
                choices = allowed_ids(words)
                allowed = {*choices}
                if wanted and (wanted[0] in allowed or rng.random() < 0.5):
                    token_id = wanted.pop(0)
                if not wanted or token_id not in allowed:
                    token_id = rng.choice([one for one in closing if one in allowed and rng.random() < 0.8] or choices)
            if token_id == self.eos:
                break
            written.append(token_id)
            constraint.push(token_id)
        return self.backend.decode(written, skip_special_tokens=False), len(written) == MOST_TOKENS


def value(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    simple: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
        {"type": "integer", "minimum": -5, "maximum": 300},
        {"type": "boolean"},
        {"enum": ["C", "a b", "x<y", 1, True, None]},
        {"type": "string", "enum": ["C", "Fahr enheit"]},
        {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "string", "pattern": "^[a-f]{2}$"}]},
    ]
    if depth < 2 and rng.random() < 0.3:
        return rng.choice([{"type": "array", "items": value(rng, depth + 1), "maxItems": 2}, schema(rng, depth + 1)])
    return rng.choice(simple)


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(["city", "unit", "class", "a-b", "x_1"], rng.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }


def attempts(family: CallFamily, name: str, given: dict[str, Any]) -> list[str]:
    """Return calls as models write them: in the family's forms, and in others that its parser may read."""
    as_json = json.dumps(given)
    whole = f'{{"name": "{name}", "arguments": {as_json}}}'
    swapped = f'{{"arguments": {as_json}, "name": "{name}"}}'
    quoted = json.dumps({"name": name, "arguments": as_json})
    before, _, after = family.written([("NAME", "ARGUMENTS")]).partition("NAME")
    plain = ", ".join(f"{key}={one!r}" for key, one in given.items())
    wrapped = [f"{family.before}{family.opening}{each}{family.closing}" for each in (whole, swapped, quoted)]
    return [
        family.written([(name, as_json)]),
        family.written([("free", as_json), (name, as_json)]),
        own_form(family, name, given),
        whole,
        f"```json\n{whole}\n```",
        f"```json\n{swapped}\n```",
        whole.replace('"name": "', '"name": "functions.'),
        whole.replace("{", '{"type": "function", ', 1),
        f"{{{whole}}}",
        f"[{name}({plain})]",
        f"{before}\u00a0 {name}{after.replace('ARGUMENTS', as_json)}",
        f"<tool_call>\n<function={name}>\n{as_json}\n</function>\n</tool_call>",
        *wrapped,
    ]


@pytest.fixture(autouse=True)
def masks_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let masks take no time. A slow one is given up, and Python may collect garbage while one is filled."""
    monkeypatch.setattr(compiled, "thread_time_ns", lambda: 0)


@pytest.mark.parametrize("has_special", [False, True], ids=["tags as text", "special tags"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_arguments_of_strict_tools_obey_their_schemas(family: CallFamily, *, has_special: bool) -> None:
    rng = random.Random(f"{family.name} {has_special}")
    num_obeyed = num_free = 0
    strict = {name: schema(rng) for name in NAMES} | {"no.args": {**schema(rng), "properties": {}, "required": []}}
    model = Model(family, strict, has_special=has_special)
    for name in (*NAMES, "free"):
        for text in attempts(family, name, {"city": rng.choice(["Paris", 5, 'x"y', [{}]]), "zz": 1}):
            answer, is_cut = model.write(rng.choice(["", "Sure. "]) + text, rng)
            parser = family.parser({**strict, "free": FREE}, strict=frozenset(strict))
            calls = read(segments_of(AnswerReader(None, parser), [answer], is_cut=is_cut)).calls
            for called, arguments in calls[: -1 if is_cut else None]:
                num_free += called == "free"
                if called in strict:
                    num_obeyed += 1
                    jsonschema.validate(json.loads(arguments), strict[called])
    assert num_obeyed > 3
    assert num_free > 0
    assert model.num_masks > 0


STRICT = {"get": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}}


@pytest.mark.parametrize(
    "text",
    [
        "Call get with {} or <tool_call> tags, as in get(n=2).",
        '```json\n{"name": "Ada", "age": 5}\n```',
        '{"name": "get", "description": "Gets."}',
        '<tool_call>\n{"name": "free", "arguments": {"city": "x", "get": {"n": "y"}}}\n</tool_call>',
        "<think>{'name': 'get'}</think>",
    ],
)
def test_text_and_calls_of_other_tools_are_free(text: str) -> None:
    assert Model(HERMES, STRICT, has_special=True).write(text, random.Random(0)) == (text, False)


def test_no_mask_is_made_in_text() -> None:
    model = Model(HERMES, STRICT, has_special=True)
    model.write('A long text, about <tools> {and "more"}: [1, 2, 3]. ' * 5, random.Random(0))
    assert model.num_masks == 0


def test_calls_within_reasoning_obey_as_well() -> None:
    call = '<tool_call>{"name": "get", "arguments": {"n": "many"}}</tool_call>'
    answer, _ = Model(HERMES, STRICT, has_special=False).write(f"<think>Hm. {call}", random.Random(0))
    reader = AnswerReader(
        ThinkingParser(ReasoningMode(THINK, is_open=False), lambda: HERMES.parser(STRICT, strict=frozenset(STRICT))),
        HERMES.parser(STRICT, strict=frozenset(STRICT)),
    )
    answer_read: Read = read(segments_of(reader, [answer]))
    ((_, arguments),) = answer_read.calls
    jsonschema.validate(json.loads(arguments), STRICT["get"])


def test_draft_ends_before_a_part_begins_and_before_it_may_end() -> None:
    model = Model(HERMES, STRICT, has_special=False)
    constraint = model.constraint()
    text = '{"name": "get", "arguments": {"n": 1}} {"name": '
    ids = model.backend.encode(text, add_special_tokens=False).ids
    num_lead = len('{"name": "')
    assert constraint.possible(ids) == ids[: num_lead - 1]
    for token_id in ids[:num_lead]:
        constraint.push(token_id)
    assert not constraint.is_free
    rest = ids[num_lead:]
    possible = constraint.possible(rest)
    assert possible == rest[: text.index("}}") + 1 - num_lead]
    rows = np.zeros((len(possible) + 1, -(-model.size // 32)), np.uint32)
    constraint.fill_masks(rows, 0, possible)
    for number, token_id in enumerate(possible):
        assert token_id in allowed_ids(rows[number])
        constraint.push(token_id)
    assert ids[num_lead + len(possible)] in allowed_ids(rows[-1])
    constraint.push(ids[num_lead + len(possible)])
    assert constraint.is_free
    assert not constraint.is_complete
