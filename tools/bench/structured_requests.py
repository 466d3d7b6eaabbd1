"""Defines the requests of the benchmark of structured outputs: eight schemas as applications have them, and prompts.

All strings, lists and numbers have bounds, so that every answer that obeys its schema ends by itself. The prompts ask
for what the schema describes, because no server puts the schema into the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from loadtest.prompts import WORDS

FREE_TOKENS = 128  # of an answer without a constraint
MOST_CONSTRAINED_TOKENS = 400  # far more than the answers need
NUM_WORDS = 80  # of a prompt, about one token each


def record(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others, as libraries make it from a class."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text(most_characters: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most_characters}


def whole(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def array(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


DATE = {"type": "string", "format": "date"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "support ticket": record(
        category={"enum": ["billing", "delivery", "account", "bug report", "feature request", "other"]},
        priority={"enum": ["low", "normal", "high", "urgent"]},
        needs_human={"type": "boolean"},
        confidence_percent=whole(0, 100),
    ),
    "person": record(
        name=text(30),
        age=whole(0, 120),
        born=maybe(DATE),
        occupation=maybe(text(30)),
        interests=array(text(20), 1, 4),
    ),
    "invoice": {
        "$defs": {"Line": record(article=text(24), quantity=whole(1, 99), price_cents=whole(0, 99_999))},
        **record(
            number={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
            issued=DATE,
            currency={"enum": ["EUR", "USD", "GBP", "CHF"]},
            lines=array({"$ref": "#/$defs/Line"}, 1, 3),
            is_paid={"type": "boolean"},
        ),
    },
    "postal address": record(
        recipient=text(30),
        street=text(30),
        house_number=whole(1, 9999),
        postal_code={"type": "string", "pattern": "^[0-9]{5}$"},
        city=text(24),
        country={"enum": ["DE", "FR", "IT", "ES", "PL", "US"]},
    ),
    "calendar event": {
        "$defs": {"Guest": record(name=text(24), role={"enum": ["host", "speaker", "guest"]})},
        **record(
            title=text(40),
            day=DATE,
            minutes=whole(5, 480),
            guests=array({"$ref": "#/$defs/Guest"}, 0, 3),
            is_online={"type": "boolean"},
        ),
    },
    "product review": record(
        sentiment={"enum": ["positive", "neutral", "negative"]},
        stars=whole(1, 5),
        praises=array(text(30), 0, 2),
        complaints=array(text(30), 0, 2),
        summary=text(80),
    ),
    "tool call": record(
        call={
            "anyOf": [
                record(tool={"const": "search"}, query=text(60), limit=whole(1, 20)),
                record(tool={"const": "send_mail"}, to=text(30), subject=text(40), body=text(80)),
                record(tool={"const": "set_timer"}, minutes=whole(1, 600), label=maybe(text(30))),
            ]
        }
    ),
    "solution in steps": {
        "$defs": {"Step": record(thought=text(50), result=text(20))},
        **record(steps=array({"$ref": "#/$defs/Step"}, 2, 3), answer=text(20)),
    },
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    body: dict[str, Any]
    schema: dict[str, Any] | None = None  # that the answer is held to
    is_measured: bool = True  # its times between tokens count; not for one that stands in for a constrained request


def asks(
    slot: int, seed: int, *, with_constraints: bool, stand_in_tokens: Sequence[int] = (), **fields: Any
) -> Iterator[Ask]:
    """Yield the requests of one of the streams, without an end. `fields` come into each body.

    Every other stream is constrained, by one schema after the other. Without constraints it has the same prompts, and
    its answers have lengths drawn from `stand_in_tokens`, so that prompts and answers take the same share of the work.
    """
    prompts, lengths = random.Random(f"prompts {seed} {slot}"), random.Random(f"lengths {seed} {slot}")
    names = list(SCHEMAS)
    for number in count():
        name = names[(slot // 2 + number) % len(names)]
        words = " ".join(prompts.choices(WORDS, k=NUM_WORDS))
        prompt = f"{seed}-{slot}-{number}: Write the {name} that these words are about: {words}."
        body = fields | {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if slot % 2 == 0:
            yield Ask(body | {"max_tokens": FREE_TOKENS, "ignore_eos": True})
        elif with_constraints:
            form = {"name": name.replace(" ", "_"), "strict": True, "schema": SCHEMAS[name]}
            body |= {"response_format": {"type": "json_schema", "json_schema": form}}
            yield Ask(body | {"max_tokens": MOST_CONSTRAINED_TOKENS}, schema=SCHEMAS[name])
        else:
            num_tokens = lengths.choice(stand_in_tokens)
            yield Ask(body | {"max_tokens": num_tokens, "ignore_eos": True}, is_measured=False)
