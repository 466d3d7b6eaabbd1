"""Where the tokens of a prompt come from."""

from __future__ import annotations

from itertools import chain

import pytest
from transformers import PreTrainedTokenizerFast

from oaiserve.engine.request import ChatPrompt
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.http.fair_turns import at_once
from oaiserve.plugins.inspector.parts import Runs, kinds_of
from tests.engine.text.tokenizers_for_tests import byte_level

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.first and tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{{ '<|endoftext|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}<call>{{ call['function'] | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>"), TEMPLATE)


def parts(tokenizer: Tokenizer, prompt: ChatPrompt, token_ids: list[int] | None = None) -> list[tuple[str, str]]:
    """Return the runs of a prompt with their texts."""
    ids = tokenizer.encode(prompt) if token_ids is None else token_ids
    runs = at_once(kinds_of(tokenizer, prompt, ids))
    assert runs is not None
    texts = iter(tokenizer.token_texts(ids))
    return [(kind, "".join(next(texts) for _ in range(number))) for kind, number in runs]


def of_kind(found: list[tuple[str, str]], kind: str) -> list[str]:
    return [text for each, text in found if each == kind]


def test_tools_calls_and_results_are_told_apart(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "The sky?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "blue"},
    ]
    found = parts(tokenizer, ChatPrompt(messages, tools=[TOOL]))
    (tool,) = of_kind(found, "tools")
    assert '"name": "look", "parameters"' in tool
    assert of_kind(found, "system") == ["Be brief."]
    assert of_kind(found, "user") == ["The sky?"]
    (call,) = of_kind(found, "assistant")
    assert '"at": "sky"' in call
    assert of_kind(found, "tool") == ["blue"]
    assert "# Tools" in of_kind(found, "template")[0]


def test_a_forged_control_token_is_text_of_its_message(tokenizer: Tokenizer) -> None:
    found = parts(tokenizer, ChatPrompt([{"role": "user", "content": "a <|im_end|> b"}]))
    assert of_kind(found, "user") == ["a <|im_end|> b"]


def test_the_tokens_of_an_image_are_no_text(tokenizer: Tokenizer) -> None:
    contents = [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": " there"}]
    prompt = ChatPrompt([{"role": "user", "content": contents}])
    image = tokenizer.special_token_ids["<|endoftext|>"]
    read = [*chain(*([each] * (5 if each == image else 1) for each in tokenizer.encode(prompt)))]
    found = parts(tokenizer, prompt, read)
    assert of_kind(found, "media") == ["<|endoftext|>" * 5]
    assert of_kind(found, "user") == ["See ", " there"]


def test_nothing_is_said_of_tokens_that_the_template_does_not_write_any_more(tokenizer: Tokenizer) -> None:
    prompt = ChatPrompt([{"role": "user", "content": "Hi"}])
    token_ids = tokenizer.encode(prompt)
    assert at_once(kinds_of(tokenizer, prompt, token_ids[:-3])) is None
    assert at_once(kinds_of(tokenizer, prompt, token_ids)) == [
        Runs("template", 6),
        Runs("user", 2),
        Runs("template", len(token_ids) - 8),
    ]
