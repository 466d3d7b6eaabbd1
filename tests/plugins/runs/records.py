"""Records of the turns of a run."""

from dataclasses import replace
from typing import Any

from oaiserve.facts.record import RequestRecord
from oaiserve.facts.turn import Turn, TurnPrompt
from tests.records import record_at

PROMPT = TurnPrompt("question", False, "digest 0", (), {"user": 10})
NAMED = Turn("run_1", True, "", 0, lambda: PROMPT)


def turn_at(start_ms: int, end_ms: int, *, turn: dict[str, Any] | None = None, **fields: Any) -> RequestRecord:
    """Return the record of a turn between these times."""
    of_prompt = {name: value for name, value in (turn or {}).items() if name in TurnPrompt._fields}
    of_turn = {name: value for name, value in (turn or {}).items() if name not in of_prompt}
    place = replace(NAMED, **of_turn, prompt=lambda: PROMPT._replace(**of_prompt))
    defaults = {"request_id": f"req-{start_ms}", "turn": place, "prompt_tokens": 100}
    return record_at(start_ms, *[start_ms] * 5, end_ms, end_ms, **(defaults | fields))
