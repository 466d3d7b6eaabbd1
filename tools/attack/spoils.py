"""Spoiled files and texts, as strategies of Hypothesis: an edit takes sound bytes, and draws others from them."""

from __future__ import annotations

import copy
import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st

Edit = Callable[[st.DrawFn, bytes], bytes]

EXTREMES: tuple[Any, ...] = (  # some just within what the check of files lets through
    *(0, 1, -1, 2, 255, 2**12, 2**16, 2**20, 2**24, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63),
    *(2**64 - 1, 2**64, 10**30, 0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf")),
    *(None, True, "", "x" * 300, "../../../etc/passwd", [], {}, [[]], [None], {"": {}}),
)
# Beyond Python's limits of digits and of nesting, nested less deeply than its limit, no character, no UTF-8, no number
# of JSON, and beyond all floats.
TOKENS = (
    *(b"7" * 5000, b"[" * 20_000 + b"]" * 20_000, b'{"a":' * 900 + b"1" + b"}" * 900, b'"\\ud800"', b'"\xff"', b"NaN"),
    b"1e999",
)
# Parts of regular expressions that are invalid, that only some engines support, or that take long.
PATTERNS = (
    *("[z-a]+", "(", ")?", "|", "{3,2}", "{1,99}", "(a+)+", ".*", "[^b]*", r"\w*?", r"\1", "(?<=a)", "(?P<x>a)", "\\"),
    "",
)
NUMBERS = [
    number.to_bytes(size, "little")
    for size in (1, 2, 4, 8)
    for number in (0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size - 1) - 1, 2 ** (4 * size))
]
_TOKEN = re.compile(rb'[:\[,]\s*("(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null)(?!\s*:)')
_TEXT = re.compile(rb'"((?:[^"\\]|\\.)*)"')
HEAD_BYTES = 4096
SEEDS = st.integers(0, 2**64 - 1)


def place(content: bytes, rng: Random) -> int:
    """Return a place in the content, mostly near its beginning, where headers are."""
    return rng.randrange(min(len(content), rng.choice((64, HEAD_BYTES, len(content)))) + 1)


def bytes_changed(content: bytes, rng: Random) -> bytes:
    spoiled = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8)) if content else 0):
        at = min(place(content, rng), len(content) - 1)
        spoiled[at] = rng.choice((0, 255, spoiled[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(spoiled)


def number_replaced(content: bytes, rng: Random) -> bytes:
    at = place(content, rng)
    number = rng.choice((*NUMBERS, rng.randbytes(4)))
    return content[:at] + number + content[at + len(number) :]


def part_repeated(content: bytes, rng: Random) -> bytes:
    start, end = sorted((place(content, rng), place(content, rng)))
    return content[:end] + content[start:end] * rng.choice((1, 2, 30)) + content[end:]


def cut(content: bytes, rng: Random) -> bytes:
    return content[: rng.choice((place(content, rng), max(0, len(content) - 1)))]


def lengthened(content: bytes, rng: Random) -> bytes:
    return content + rng.randbytes(rng.choice((1, 8, 4096)))


BYTES = (bytes_changed, bytes_changed, number_replaced, part_repeated, cut, lengthened)


def spoiled_bytes(content: bytes, seed: int) -> bytes:
    """Return the content after one to four edits. Drawing each of them would take ten times as long as the edits."""
    rng = Random(seed)
    for _ in range(rng.choice((1, 1, 2, 4))):
        content = rng.choice(BYTES)(content, rng)
    return content


def bytes_edited(draw: st.DrawFn, content: bytes) -> bytes:
    return spoiled_bytes(content, draw(SEEDS))


def token_replaced(draw: st.DrawFn, content: bytes) -> bytes:
    """Replace a value in a text of JSON by one that readers of JSON have stumbled over."""
    spans = [match.span(1) for match in _TOKEN.finditer(content)]
    if not spans:
        return content
    begin, end = draw(st.sampled_from(spans))
    return content[:begin] + draw(st.sampled_from(TOKENS)) + content[end:]


def json_edited(draw: st.DrawFn, content: bytes) -> bytes:
    try:
        tree = json.loads(content)
        return json.dumps(edited(draw, tree)).encode()
    except (ValueError, RecursionError):  # An earlier edit has broken it.
        return content


def pattern_edited(draw: st.DrawFn, content: bytes) -> bytes:
    """Put part of a regular expression into a text of JSON, which may be a key."""
    spans = [match.span(1) for match in _TEXT.finditer(content)]
    if not spans:
        return content
    begin, end = draw(st.sampled_from(spans))
    at = draw(st.integers(begin, end))
    return content[:at] + json.dumps(draw(st.sampled_from(PATTERNS)))[1:-1].encode() + content[at:]


def header_edited(draw: st.DrawFn, content: bytes) -> bytes:
    """Edit the JSON at the beginning of a safetensors file, and write its new length."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json_edited(draw, content[8:end])
    return struct.pack("<Q", len(header)) + header + content[end:]


def line_edited(draw: st.DrawFn, content: bytes) -> bytes:
    """Edit the JSON in the first line."""
    line, line_end, rest = content.partition(b"\n")
    return json_edited(draw, line) + line_end + rest


def edited(draw: st.DrawFn, tree: Any) -> Any:
    """Remove, replace, swap, copy or rename a value somewhere in what JSON holds."""
    parents = [node for node in nodes(tree) if isinstance(node, dict | list) and node]
    if not parents:
        return copy.deepcopy(draw(st.sampled_from(EXTREMES)))
    parent = draw(st.sampled_from(parents))
    keys = st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent)))
    place = draw(keys)
    other = draw(keys)
    match draw(st.integers(0, 7)):
        case 0:
            del parent[place]
        case 1:
            parent[place], parent[other] = parent[other], parent[place]
        case 2:
            parent[place] = copy.deepcopy(parent[other])
        case 3 if isinstance(parent, dict):
            parent[draw(st.sampled_from(["", "x" * 300, f"{place}x", "model.\0"]))] = parent.pop(place)
        case 4 if isinstance(parent[place], int) and not isinstance(parent[place], bool):
            parent[place] += draw(st.sampled_from([-1, 1, 4, 16, 2**32]))
        case _:
            parent[place] = copy.deepcopy(draw(st.sampled_from(EXTREMES)))
    return tree


def nodes(tree: Any) -> Iterator[Any]:
    yield tree
    if isinstance(tree, dict | list):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from nodes(child)


@st.composite
def spoiled(draw: st.DrawFn, seeds: Callable[[], Sequence[bytes]], *edits: Edit) -> bytes:
    """Return one of the sound contents after up to four edits. Without edits, its bytes are spoiled."""
    content = draw(st.sampled_from(seeds()))
    if not edits:
        return bytes_edited(draw, content)
    for edit in draw(st.lists(st.sampled_from(edits), max_size=4)):
        content = edit(draw, content)
    return content
