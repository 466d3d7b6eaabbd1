"""Extracts fields from 30 short texts as JSON, under the same schema with different wishes.

    python -m tools.extractions MODEL [--name NAME] [--url URL NAME] [--json PATH] [--markdown PAGE]

The command prints each answer, and counts the fields that are right and the answers with properties that the schema
doesn't list. --url asks another server, too, such as llama.cpp with the same file. --show writes the table of several
results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tools.markdown import as_markdown, write_between, write_json
from tools.server_process import running_oaiserve

LIMIT_SECONDS = 600.0
MARKERS = "extractions"
FORMS = {
    "an invoice": ("seller", "item", "total"),
    "a person": ("name", "job", "city", "age"),
    "an event": ("title", "place", "day", "speakers"),
}
KINDS = {
    "total": {"type": "number"},
    "age": {"type": "integer"},
    "speakers": {"type": "array", "items": {"type": "string"}},
}
# Texts with the values of their form's fields, in order.
TEXTS: dict[str, list[tuple[str, list[Any]]]] = {
    "an invoice": [
        ("Café Größe, Berlin. 2 Cappuccino. Summe: 7,80 EUR.", ["Café Größe", "Cappuccino", 7.8]),
        ("Invoice from Acme Tools: one cordless drill, $129.99 in total.", ["Acme Tools", "cordless drill", 129.99]),
        ("EDF. Électricité, mars. Montant dû : 143,22 €", ["EDF", "Électricité", 143.22]),
        ("Shell Station Nord, Super E10, 41,30 EUR", ["Shell Station Nord", "Super E10", 41.3]),
        ("Books & Beans charged you $18.50 for a notebook.", ["Books & Beans", "notebook", 18.5]),
        ("Receipt: Green Grocer. Apples. Total due $4.20.", ["Green Grocer", "Apples", 4.2]),
        ("Hotel Zur Post, Übernachtung, gesamt 89 Euro", ["Hotel Zur Post", "Übernachtung", 89]),
        ("Your order at Pixel Store: a webcam. Total: 59.00 USD", ["Pixel Store", "webcam", 59]),
        ("Taxi Müller: Fahrt zum Flughafen, 32,50 EUR", ["Taxi Müller", "Fahrt zum Flughafen", 32.5]),
        ("Northwind sold a desk lamp for 24.95 dollars.", ["Northwind", "desk lamp", 24.95]),
    ],
    "a person": [
        ("Maria Silva, 34, is a nurse in Lisbon.", ["Maria Silva", "nurse", "Lisbon", 34]),
        ("Hi, I'm Tom Baker! I'm 29 and work as a chef in Leeds.", ["Tom Baker", "chef", "Leeds", 29]),
        ("Jürgen Groß (51) ist Lehrer in Köln.", ["Jürgen Groß", "Lehrer", "Köln", 51]),
        ("The pilot Aiko Tanaka, aged 42, lives in Osaka.", ["Aiko Tanaka", "pilot", "Osaka", 42]),
        ("Ola Nordmann is a 60-year-old fisherman from Bergen.", ["Ola Nordmann", "fisherman", "Bergen", 60]),
        ("Zoë O'Neil, lawyer, Dublin, 38 years old", ["Zoë O'Neil", "lawyer", "Dublin", 38]),
        ("At 25, Liam Chen already is an architect in Toronto.", ["Liam Chen", "architect", "Toronto", 25]),
        ("Name: Ana López. Job: baker. City: Quito. Age: 47.", ["Ana López", "baker", "Quito", 47]),
        ("Our new dentist in Graz is Eva Huber, 33.", ["Eva Huber", "dentist", "Graz", 33]),
        ("Musa Diallo, a 56 year old driver from Dakar", ["Musa Diallo", "driver", "Dakar", 56]),
    ],
    "an event": [
        ("Rust Night at the Old Mill on Friday with Ann and Bo.", ["Rust Night", "Old Mill", "Friday", ["Ann", "Bo"]]),
        ("Jazz Brunch, Café Ö, Sunday. No speakers.", ["Jazz Brunch", "Café Ö", "Sunday", []]),
        ("On Monday, Kim gives 'Tea 101' in Room 4.", ["Tea 101", "Room 4", "Monday", ["Kim"]]),
        ("Data Day: Tuesday, Hall B. Speakers: Li, Roy.", ["Data Day", "Hall B", "Tuesday", ["Li", "Roy"]]),
        ("Poetry Slam on Saturday in the City Library.", ["Poetry Slam", "City Library", "Saturday", []]),
        ("Thursday: Yoga Basics with Mia in Studio 2", ["Yoga Basics", "Studio 2", "Thursday", ["Mia"]]),
        ("Chess Club meets on Wednesday at Bar Roma.", ["Chess Club", "Bar Roma", "Wednesday", []]),
        ("Film Talk, Kino Süd, Friday, with Jo and Max", ["Film Talk", "Kino Süd", "Friday", ["Jo", "Max"]]),
        ("Sunday's Bird Walk starts at Lake House; Finn leads.", ["Bird Walk", "Lake House", "Sunday", ["Finn"]]),
        ("Go Meetup, Monday, Hub 9: Ida, Per", ["Go Meetup", "Hub 9", "Monday", ["Ida", "Per"]]),
    ],
}


def schema_of(form: str) -> dict[str, Any]:
    properties = {name: KINDS.get(name, {"type": "string"}) for name in FORMS[form]}
    return {"type": "object", "properties": properties, "required": [*FORMS[form]]}


def constraints_of(form: str) -> dict[str, dict[str, Any]]:
    """Return the ways to ask for the form, by their names in the table."""
    named = {"name": "form", "schema": schema_of(form)}
    not_strict = {"type": "json_schema", "json_schema": {**named, "strict": False}}
    return {
        "one line": {"structured_outputs": {"json": schema_of(form), "disable_any_whitespace": True}},
        "default": {"response_format": {"type": "json_schema", "json_schema": named}},
        "`strict: false`": {"response_format": not_strict},
    }


async def answer(http: httpx.AsyncClient, form: str, text: str, constraint: Mapping[str, Any]) -> str:
    prompt = f"Extract {form} as JSON with the keys {', '.join(FORMS[form])}.\n\n{text}"
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 120, "temperature": 0, **constraint}
    response = await http.post("/v1/chat/completions", json=body)
    content: str = response.raise_for_status().json()["choices"][0]["message"]["content"]
    return content


def outcome(answer: str, form: str, expected: list[Any]) -> tuple[int, bool]:
    """Return the number of right fields, and whether there are others than those of the form."""
    try:
        found = json.loads(answer)
    except ValueError:  # cut off
        return 0, False
    right = sum(found.get(name) == value for name, value in zip(FORMS[form], expected, strict=True))
    return right, found.keys() > set(FORMS[form])


async def extract(servers: Mapping[str, str]) -> dict[str, Any]:
    """Print the answers of servers, whose URLs have names, and return what is counted. "" is this server."""
    counted: dict[str, list[int]] = {}
    num_fields = 0
    for form, texts in TEXTS.items():
        for text, expected in texts:
            print(text)
            num_fields += len(expected)
            for server, url in servers.items():
                async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS) as http:
                    for way, constraint in constraints_of(form).items():
                        if server and way != "default":
                            continue
                        content = await answer(http, form, text, constraint)
                        right, has_others = outcome(content, form, expected)
                        counts = counted.setdefault(server or way, [0, 0])
                        counts[0] += right
                        counts[1] += has_others
                        layout = " (in lines)" if "\n" in content else ""
                        print(f"  {right} {server or way}: {' '.join(content.split())}{layout}")
    return {"fields": num_fields, "ways": counted}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    ways = list(dict.fromkeys(way for each in results for way in each["ways"]))
    rows = [(f"fields that are right, of {results[0]['fields']}", *ways)]
    for each in results:
        cells = []
        for way in ways:
            right, others = each["ways"].get(way, ("not asked", 0))
            cells.append(f"{right}, {others} answers with others" if others else f"{right}")
        rows.append((each["model"], *cells))
    return "\n".join(as_markdown(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--name", help="the model's name in the table")
    parser.add_argument("--url", nargs=2, metavar=("URL", "NAME"), help="another server, and its name in the table")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--show", type=Path, nargs="+", metavar="JSON", help="ask nothing; show these results")
    parser.add_argument("--markdown", type=Path, help=f"write the table there, between the markers of {MARKERS}")
    args = parser.parse_args()
    if args.show:
        results = [json.loads(path.read_text()) for path in args.show]
    else:
        others = {args.url[1]: args.url[0]} if args.url else {}
        with running_oaiserve(model=args.model) as server:
            found = asyncio.run(extract({"": server.url, **others}))
        results = [{"model": args.name or Path(args.model).stem, **found}]
        write_json(args.json, results[0])
    print(table(results))
    if args.markdown:
        write_between(args.markdown, MARKERS, table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
