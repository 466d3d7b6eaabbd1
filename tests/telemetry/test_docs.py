"""The pages on telemetry, spans and slow requests list exactly what the server reports about itself."""

import re
from pathlib import Path

from oaiserve.facts.record import MOST_EVENTS, Cause, EventKind, Outcome, ToolCallOutcome, WaitReason
from oaiserve.facts.step_record import HostPart
from oaiserve.facts.times import PHASES, STAMPS
from tests.telemetry.reported import ATTRIBUTES

PAGES = ("telemetry.md", "reference/spans.md", "slow-requests.md")
PAGE, SPANS, SLOW = ((Path(__file__).parents[2] / "docs" / name).read_text() for name in PAGES)
CELL = re.compile(r"(?<!\\)\|")


def rows(first_column: str, page: str = PAGE) -> list[list[str]]:
    """Return the cells of the table whose first column has this header."""
    table = page.split(f"\n| {first_column} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in CELL.split(line)[1:-1]] for line in table.splitlines()[2:]]


# Those of the plug-in that lets spans have texts.
OF_TEXTS = {
    f"gen_ai.{name}" for name in ("input.messages", "output.messages", "system_instructions", "tool.definitions")
}


# Words in capital letters that the page has instead of each value.
VALUES = {"REASON": list(WaitReason), "CAUSE": list(Cause), "OUTCOME": list(ToolCallOutcome)}


def test_the_pages_name_every_attribute_and_no_other() -> None:
    documented = set(re.findall(r"`((?:gen_ai|http|url|server|error|oaiserve)\.[a-zA-Z_.]+)`", PAGE + SPANS))
    for word, values in VALUES.items():
        (pattern,) = (name for name in documented if word in name)
        documented = documented - {pattern} | {pattern.replace(word, value) for value in values}
    assert documented - {"oaiserve.request"} == ATTRIBUTES | OF_TEXTS


def test_the_tables_of_phases_outcomes_reasons_and_parts_match_the_code() -> None:
    assert [row[0].strip("`") for row in rows("phase", SLOW)] == ["", *PHASES]
    assert [row[1].strip("`") for row in rows("phase", SLOW)] == list(STAMPS)
    assert [row[0].strip("`") for row in rows("outcome")] == list(Outcome)
    reasons = rows("in `queue`, the request waited for", SLOW)
    assert [row[0].strip("`") for row in reasons] == list(WaitReason)
    assert [row[0].strip("`") for row in rows("part")] == list(HostPart)
    assert [row[0].strip("`") for row in rows("cause")] == list(Cause)


def test_the_table_of_events_matches_the_code() -> None:
    assert [row[0].strip("`") for row in rows("event", SPANS)] == list(EventKind)
    assert f"the first {MOST_EVENTS}." in SPANS
