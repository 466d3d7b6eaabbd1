"""The bytes of an answer without ids and times, and its events by choice: two answers to one request share these."""

import re

TIMES = re.compile(rb'("created(?:_at)?"):(\d+)(?=[,}])')
_ids = re.compile(rb"[0-9a-f]{32}")
_completed = re.compile(rb'"completed_at":\d+')


def shown(content: bytes) -> bytes:
    """Return an answer without what differs between two of the same request. An id that changes in it still shows."""
    for pattern, group, name in ((_ids, 0, b"ID%d"), (TIMES, 2, rb'"created":%d')):
        numbers: dict[bytes, int] = {}
        content = pattern.sub(
            lambda m, numbers=numbers, group=group, name=name: name % numbers.setdefault(m[group], len(numbers)),
            content,
        )
    return _completed.sub(b'"completed_at":0', content)


def by_choice(content: bytes) -> dict[int, list[bytes]]:
    """Return the whole events of a stream by choice, in their order. Choices may come in any order."""
    choices: dict[int, list[bytes]] = {}
    for event in content.split(b"\n\n")[:-1]:
        choice = re.search(rb'"choices":\[\{"index":(\d+)', event)
        choices.setdefault(-1 if choice is None else int(choice[1]), []).append(event)
    return choices
