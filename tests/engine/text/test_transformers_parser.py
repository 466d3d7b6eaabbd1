"""A new transformers may change the parts of its parser that oaiserve uses without a promise."""

import ast
import inspect

import transformers
from transformers.utils.chat_parsing import ResponseParser

from oaiserve.engine.text import transformers_parser
from oaiserve.engine.text.transformers_parser import USED, forget_read, unread

FIELDS = {"content": {}, "tool_calls": {"open": "<call>", "close": "</call>", "optional": True}}


def parser() -> ResponseParser:
    return ResponseParser({"start_anchor": "a", "fields": FIELDS}, prefix="")


def test_the_installed_transformers_has_what_is_used_of_its_parser() -> None:
    missing = sorted(USED - vars(parser()).keys())
    assert missing == [], f"the ResponseParser of transformers {transformers.__version__} has no {', '.join(missing)}"


def test_the_list_of_used_parts_is_that_of_our_code() -> None:
    tree = ast.parse(inspect.getsource(transformers_parser))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert used == USED


def test_only_text_that_may_begin_a_tag_is_unread() -> None:
    reading = parser()
    reading.feed("Some text <ca")
    assert unread(reading) == "<ca"


def test_a_parser_continues_after_it_forgot_what_it_read() -> None:
    remembering = parser()
    forgetting = parser()
    for each in (remembering, forgetting):
        each.feed("Some text <ca")

    forget_read(forgetting)

    assert forgetting.feed("ll>one</call>") == [
        {**event, "value": ""} if event.get("field") == "content" else event
        for event in remembering.feed("ll>one</call>")
    ]
