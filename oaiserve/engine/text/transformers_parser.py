"""The parts of transformers' parser of answers that its documentation doesn't promise.

These may change with any new version, so a test compares USED with the installed transformers and with the code here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

USED = frozenset({"_body", "_buffer", "_pos"})  # attributes that we read or set


def unread(parser: ResponseParser) -> str:
    """Return the text that a parser holds back because it may belong to a tag."""
    return str(parser._buffer[parser._pos :])


def forget_read(parser: ResponseParser) -> None:
    """Drop the text that a parser has already read, outside of fields that it reads as a whole."""
    parser._buffer = unread(parser)
    parser._pos = 0
    parser._body = ""
