"""The requests of a session, as a file that can be published: their structure is the client's, their texts are not.

A client sends its whole history with each request, so the file has the last request, and how many of its items or
messages each one had. Words of texts are replaced by others, and long texts are cut; names, types and calls stay.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "recordings"
WORDS = ["the", "model", "reads", "a", "file", "and", "writes", "an", "answer", "to", "its", "user", "with", "care"]
MOST_WORDS = 6  # words of a string that stays, unless it is a description
MOST_CHARACTERS = 40  # A string whose words are replaced is cut here.


def record(bodies: Sequence[tuple[str, bytes]], places: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the file. `places` are folders of this machine, and what they are called instead."""
    paths = {path for path, _ in bodies}
    assert len(paths) == 1, paths
    parsed = []
    for _, body in bodies:
        text = body.decode()
        for place, name in places.items():
            text = text.replace(place, name)
        parsed.append(_without_texts(json.loads(text)))
    last = parsed[-1]
    history = "input" if "input" in last else "messages"
    counts = [len(body[history]) for body in parsed]
    for body, count in zip(parsed, counts, strict=True):
        assert _comparable(body | {history: []}) == _comparable(last | {history: []})
        assert _comparable(body[history]) == _comparable(last[history][:count])
    return {"path": paths.pop(), "history": history, "counts": counts, "body": last}


def requests(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the body of each request of a recording."""
    recording = json.loads((FOLDER / f"{name}.json").read_text())
    for count in recording["counts"]:
        history = recording["body"][recording["history"]][:count]
        yield recording["path"], recording["body"] | {recording["history"]: history}


def _comparable(value: Any) -> Any:
    """Return a value without marks for a cache, which move to the last message."""
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items() if key != "cache_control"}
    return [_comparable(item) for item in value] if isinstance(value, list) else value


def _without_texts(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _without_texts(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_texts(item, key) for item in value]
    is_text = isinstance(value, str) and (key == "description" or len(value.split()) > MOST_WORDS)
    if not is_text or value.startswith(("Turn ", "x-anthropic-billing-header", "{")):
        return value
    words = iter(range(len(value)))
    return re.sub(r"[^\W\d_]{2,}", lambda _: WORDS[next(words) % len(WORDS)], value)[:MOST_CHARACTERS]
