"""docs/telemetry.md names what the server tells about itself: no more, no less."""

from __future__ import annotations

import re
from pathlib import Path

from oaiserve.telemetry import names
from oaiserve.times import PHASES, STAMPS, Outcome

PAGE = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
CELL = re.compile(r"(?<!\\)\|")


def rows(first_column: str) -> list[list[str]]:
    """The cells of the table whose header begins with that column."""
    table = PAGE.split(f"\n| {first_column} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in CELL.split(line)[1:-1]] for line in table.splitlines()[2:]]


def test_the_metrics_table_is_that_of_names() -> None:
    expected = [[f"`{m.name}`", m.type, ", ".join(f"`{label}`" for label in m.labels), m.help] for m in names.METRICS]
    assert rows("metric") == expected


def test_every_attribute_is_named_and_no_other() -> None:
    constants = {value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)}
    attributes = constants - {names.SERVICE_NAME, names.REQUEST_PARAM_PREFIX}
    attributes |= set(names.GEN_AI_REQUEST_PARAMS.values()) | {names.REQUEST_PARAM_PREFIX + "NAME"}
    found = set(re.findall(r"`((?:gen_ai|http|url|error|oaiserve)\.[a-zA-Z_.]+)`", PAGE)) - {"oaiserve.request"}
    assert found == attributes


def test_phases_stamps_and_outcomes_are_those_of_the_clock() -> None:
    assert [row[0].strip("`") for row in rows("phase")] == list(PHASES)
    assert [row[2].split("`")[1] for row in rows("phase")] == list(STAMPS[1:])
    assert [row[0].strip("`") for row in rows("outcome")] == list(Outcome)
