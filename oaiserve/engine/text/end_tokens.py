"""The tokens that end an answer: the model's files often name only one of them.

A model's turn may end with a different token than its training texts, and fill-in-the-middle with yet another one. So
all of them are collected: those in the files, those with the usual names, and the token that the chat template writes
after an assistant's text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from oaiserve.engine.request import ChatPrompt
from oaiserve.engine.text.special_tokens import END_TEXTS
from oaiserve.errors import InvalidRequest

if TYPE_CHECKING:
    from oaiserve.engine.text.chat_template import ChatTemplate
    from oaiserve.engine.text.tokenizer import Tokenizer

# Tokens that end only a part of an answer if the vocabulary also has one of the others. gpt-oss and Solar Open have
# such.
_TRAPS = {"<|end|>": ("<|return|>", "<|flush|>")}
# Texts in sample conversations
_ANSWER = "This is an answer."
_NAME = "name_of_a_function"


def end_token_ids(tokenizer: Tokenizer, of_files: frozenset[int]) -> frozenset[int]:
    """Return the ids of all tokens that end an answer. `of_files` are those that the model's files name."""
    added = {token.content: token_id for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()}
    traps = {trap for trap, others in _TRAPS.items() if not added.keys().isdisjoint(others)}
    ids = of_files | {added[text] for text in END_TEXTS & added.keys()}
    if tokenizer.chat_template is not None:
        known = {text for text, token_id in tokenizer.special_token_ids.items() if token_id in ids}
        written = text_after_answers(tokenizer.chat_template, tokenizer.special_token_ids.keys(), known)
        ids |= {tokenizer.special_token_ids[written]} if written is not None else set()
    return ids - {added[trap] for trap in traps}


def text_after_answers(
    template: ChatTemplate, special_texts: Collection[str], known: Collection[str] = ()
) -> str | None:
    """Return the special token that a template writes to end an assistant's text.

    Return None if it can't be determined for certain, or is already known.
    """
    question = {"role": "user", "content": "Hello."}
    answered = {"role": "assistant", "content": _ANSWER}
    last = _after_answer(template, [question, answered])
    ending = _run(last, special_texts)
    if not set(ending).isdisjoint(known):
        return None
    if not ending:  # An answer of GLM ends with the beginning of the next turn.
        ending = _run(_after_answer(template, [question, answered, question]), special_texts)[:1]
    elif last.strip().removeprefix("".join(ending))[:1].strip():  # a tag, followed by its name
        if len(ending) == 1:
            ending = [text for text in special_texts if last.rstrip().endswith(text)]
        else:
            ending = []
    if not 0 < len(ending) <= 2 or not set(ending).isdisjoint(known):  # Further tokens would begin another turn.
        return None
    function = {"name": _NAME, "description": "A sample.", "parameters": {"type": "object", "properties": {}}}
    call = {"type": "function", "id": "abcdefghi", "function": {"name": _NAME, "arguments": "{}"}}
    tools = [{"type": "function", "function": function}]
    calling = _after_answer(template, [question, {**answered, "tool_calls": [call]}], tools)
    before, is_called, _ = calling.partition(_NAME)
    if is_called and ending[-1] in before:
        return None
    return ending[-1]


def _after_answer(template: ChatTemplate, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
    """Return the template's text after the answer in these messages; "" if it rejects them."""
    try:
        rendered = template.render(ChatPrompt(messages, add_generation_prompt=False, tools=tools))
    except InvalidRequest:
        return ""
    if _ANSWER in rendered:
        return rendered.rpartition(_ANSWER)[2]
    return ""


def _run(text: str, special_texts: Collection[str]) -> list[str]:
    """Return the consecutive special tokens at the beginning of a text."""
    text = text.lstrip()
    run = []
    while token := max((one for one in special_texts if one and text.startswith(one)), key=len, default=None):
        run.append(token)
        text = text[len(token) :]
    return run
