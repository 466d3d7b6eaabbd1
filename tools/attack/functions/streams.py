"""Answers are written, and the gateway splits their streams at marks, in time linear in their length."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from oaiserve.engine.request import SamplingParams
from oaiserve.engine.requests.output import ChoiceOutput
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.text.detokenize import StopStrings, TokenTable
from oaiserve.wire.continuation import BEGUN, StreamSplitter, mark
from tests.engine.doubles import EOS, TOKENIZER
from tools.attack.functions.linear import Case

UNITS = (b": tokens ", b": tokens []", b"\n: tokens ", b"data: {}\n\n", mark(BEGUN), b"x")


def cases() -> Iterator[Case]:
    for length in (1, 3, 65536):
        for unit in UNITS:
            for is_marked in (True, False):
                name = f"{'marked' if is_marked else 'plain'} stream, many {unit!r} in pieces of {length}"
                size = 8000 if length < 10 else 200_000
                yield Case(name, splitting(unit, length, is_marked=is_marked), size)
    yield Case("tokens without text", push_without_text, 2000)


def splitting(unit: bytes, length: int, *, is_marked: bool) -> Callable[[int], None]:
    def split(size: int) -> None:
        splitter = StreamSplitter(is_marked=is_marked)
        stream = unit * (size // len(unit))
        for start in range(0, len(stream), length):
            splitter.push(stream[start : start + length])

    return split


def push_without_text(size: int) -> None:
    table = TokenTable(TOKENIZER.backend)
    assert EOS in table.special_ids  # It is not shown.
    sequence = Sequence("r", 0, [1], SamplingParams(ignore_eos=True), max_len=size + 10)
    output = ChoiceOutput(sequence, table, StopStrings([]), eos_token_ids=frozenset([EOS]), stream_interval=1)
    for _ in range(size):
        output.push(EOS, None)
        assert output.take() is None
