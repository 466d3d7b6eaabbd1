import inspect
import json
from dataclasses import asdict
from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from oaiserve.engine.request import ChatPrompt
from oaiserve.engine.text.chat_template import ChatTemplate
from oaiserve.engine.text.template_abilities import one_call_each
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import InvalidRequest, StartupError
from tests.engine.text.tokenizers_for_tests import CHATML, byte_level

HELLO = {"role": "user", "content": "hello"}
ALTERNATING = (  # no system message but the first, strictly user and assistant in turns
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "<{{ m.role }}:{{ m.content }}>{% endfor %}"
)
PARTS = "{% for m in messages %}<{{ m.role }}:{% for part in m.content %}{{ part.text }}|{% endfor %}>{% endfor %}"
STRING_OR_PARTS = (
    "{% for m in messages %}<{{ m.role }}:"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}>{% endfor %}"
)


def wrap(chat_template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=chat_template)


def template_of(source: str) -> ChatTemplate:
    return Tokenizer(wrap(source)).chat_template


def render(template: str, *messages: dict[str, Any], **options: Any) -> str:
    return template_of(template).render(ChatPrompt(messages, **options))


def test_chat_asks_for_an_answer_or_continues_the_last_message() -> None:
    answer = {"role": "assistant", "content": "well, "}
    assert render(CHATML, HELLO).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert render(CHATML, HELLO, add_generation_prompt=False).endswith("hello<|im_end|>\n")
    continued = render(CHATML, HELLO, answer, add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("<|im_start|>assistant\nwell, ")


def test_a_template_that_is_no_jinja_stops_the_start() -> None:
    with pytest.raises(StartupError, match=r"not valid Jinja: .* \(line 1\)"):
        Tokenizer(wrap("{% for m in %}"))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", "Roles must alternate."),
        ("{{ messages[1].content }}", "list object has no element 1"),
        ("{{ 'text: ' + messages[0] }}", "can only concatenate str"),
    ],
)
def test_what_a_template_rejects_is_the_clients_error(template: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        render(template, {"role": "assistant", "content": "hello"})
    assert caught.value.param == "messages"


TWO = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (CHATML, TWO, "<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"),
        (PARTS, TWO, "<user:one|two|>"),
        (STRING_OR_PARTS, TWO, "<user:onetwo>"),
        (PARTS, "hello", "<user:hello|>"),
        (STRING_OR_PARTS, "hello", "<user:hello>"),
    ],
)
def test_contents_are_strings_or_parts_as_the_template_takes_them(template: str, content: Any, expected: str) -> None:
    assert render(template, {"role": "user", "content": content}) == expected


@pytest.mark.parametrize("template", [CHATML, PARTS])
def test_a_part_that_is_no_text_is_refused_by_its_type(template: str) -> None:
    with pytest.raises(InvalidRequest, match="'image_url'") as caught:
        render(template, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]})
    assert caught.value.param == "messages"


def test_developer_is_system_for_a_template_that_lacks_it() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert render(STRING_OR_PARTS, developer) == "<system:Be brief.>"
    assert render("{# 'developer' #}" + STRING_OR_PARTS, developer) == "<developer:Be brief.>"


def test_system_messages_are_merged_only_where_the_template_takes_one() -> None:
    messages = [{"role": "system", "content": "A"}, HELLO, {"role": "developer", "content": "B"}]
    assert render(ALTERNATING, *messages) == "[A\n\nB]<user:hello>"
    assert render(STRING_OR_PARTS, *messages) == "<system:A><user:hello><system:B>"


SAID = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([HELLO, HELLO], "<user:hello\n\nhello>"),
        ([SAID, HELLO], "<user:><assistant:yes><user:hello>"),
        (
            [HELLO, {"role": "assistant", "content": ""}, HELLO, SAID, SAID],
            "<user:hello\n\nhello><assistant:yes\n\nyes>",
        ),
        ([HELLO, {"role": "tool", "content": "got"}, HELLO], "<user:hello><tool:got\n\nhello>"),
    ],
)
def test_messages_are_joined_for_a_template_that_wants_turns(messages: list[Any], expected: str) -> None:
    assert render(ALTERNATING, *messages) == expected
    assert render(STRING_OR_PARTS, *messages).count("<") == len(messages)


@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"city": "Rome"}', "Rome"), ("no json", "none"), ("[1]", "none"), ("", "")]
)
def test_tool_arguments_are_parsed_where_they_are_an_object(arguments: str, expected: str) -> None:
    template = (
        "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a.city if a is mapping else 'none' }}"
        "{{ messages[0].content is defined }}"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    assert render(template, {"role": "assistant", "content": None, "tool_calls": [call]}) == f"{expected}False"


def test_tool_arguments_stay_a_text_for_a_template_that_joins_them() -> None:
    template = "{% for m in messages if m.tool_calls %}{{ '<' + m.tool_calls[0].function.arguments + '>' }}{% endfor %}"
    call = {"function": {"name": "weather", "arguments": '{"a":1}'}}
    assert render(template, {"role": "assistant", "content": None, "tool_calls": [call]}) == '<{"a":1}>'


def test_the_clients_messages_are_not_changed() -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "A"}]}]
    render(CHATML, *messages)
    assert messages == [{"role": "developer", "content": [{"type": "text", "text": "A"}]}]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"template_kwargs": {"mood": "calm", "tools": [{"name": "g"}]}}, "hello calm g"),
        ({"tools": [{"name": "f"}]}, "hello  f"),
        ({"template_kwargs": {"tools": [{"name": "g"}]}, "tools": [{"name": "f"}]}, "hello  f"),
        ({"opening": "<think>"}, "hello  none<think>"),
    ],
)
def test_variables_and_tools_reach_the_template_and_the_opening_is_behind_it(
    options: dict[str, Any], expected: str
) -> None:
    template = "{{ messages[0].content }} {{ mood }} {{ (tools or [{'name': 'none'}])[0].name }}"
    assert render(template, HELLO, **options) == expected


@pytest.mark.parametrize(
    ("template", "variables", "expected"),
    [
        (CHATML, {}, "<|im_start|>assistant\n"),
        (CHATML + "{% if deep %}<think>{% endif %}", {}, "<|im_start|>assistant\n"),
        ("{{ messages[0].content }}{% if add_generation_prompt %}A{{ deep }}{% endif %}", {"deep": "B"}, "AB"),
        ("{% if add_generation_prompt %}A{% endif %}{{ messages[0].content }}", {}, ""),
        ("{{ raise_exception('No.') }}", {}, ""),
    ],
)
def test_what_a_template_asks_for_an_answer_with(template: str, variables: dict[str, Any], expected: str) -> None:
    assert template_of(template).generation_prompt(variables) == expected


WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}>{% endfor %}"
)
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('No system.') }}{% endif %}" + CHATML
IN_MESSAGE = "{% for m in messages %}<{{ m.role }}:{{ m.content }}{{ m.tools }}>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        (WITH_TOOLS, set()),
        (CHATML, {"tools", "calls", "results"}),
        ("{# tools #}" + CHATML, {"tools", "calls", "results"}),
        (IN_MESSAGE, {"calls"}),
        (WITHOUT_SYSTEM, {"system", "tools", "calls", "results"}),
    ],
)
def test_samples_show_which_parts_a_template_takes(template: str, missing: set[str]) -> None:
    abilities = asdict(template_of(template).abilities)
    assert {name for name in ("system", "tools", "calls", "results") if not abilities[name]} == missing


NESTED = (
    "{% for t in tools or [] %}{{ t.function.name }}({% for k, v in t.function.parameters.properties.items() %}"
    "{{ k + ' ' + v.description }}{% endfor %}){% endfor %}" + CHATML
)
TOOL = {"type": "function", "function": {"name": "now", "parameters": {}}}


def test_tools_go_into_the_system_message_where_the_template_reads_them() -> None:
    assert render(IN_MESSAGE, HELLO, tools=[TOOL]) == '<system:[{"name": "now", "parameters": {}}]><user:hello>'
    system = {"role": "system", "content": "Be brief."}
    assert render(IN_MESSAGE, system, tools=[TOOL]) == '<system:Be brief.[{"name": "now", "parameters": {}}]>'


def test_a_missing_description_is_empty_only_for_a_template_that_needs_one() -> None:
    joining = "{% for t in tools or [] %}{{ t.function.name + ':' + t.function.description }}{% endfor %}" + CHATML
    assert render(joining, HELLO, tools=[TOOL]).startswith("now:<|im_start|>")
    assert "description" not in render(WITH_TOOLS, HELLO, tools=[TOOL])
    tool = {"type": "function", "function": {"name": "now", "parameters": {"properties": {"a": {"type": "string"}}}}}
    assert render(NESTED, HELLO, tools=[tool]).startswith("now(a )")


def test_a_template_that_always_lists_tools_gets_an_empty_list_without_any() -> None:
    always = "{% for t in tools %}{{ t.function.name }}{% endfor %}<{{ messages[0].content }}>"
    assert render(always, HELLO) == "<hello>"
    assert template_of(always).generation_prompt({}) == ""


def test_a_history_with_calls_needs_the_template_for_tools_also_without_any() -> None:
    template = ChatTemplate({"default": ALTERNATING, "tool_use": "tools " + WITH_TOOLS}, {})
    assert template.render(ChatPrompt([HELLO])) == "<user:hello>"
    assert template.render(ChatPrompt([HELLO, CALLING, *RESULTS])).startswith("tools <user:hello><assistant:I look.a{}")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([HELLO], "user\nBe brief.\n\nhello"),
        ([{"role": "user", "content": TWO}], "user\nBe brief.\n\none\ntwo"),
        ([{"role": "assistant", "content": "hi"}], "user\nBe brief.<|im_end|>\n<|im_start|>assistant\nhi"),
    ],
)
def test_a_system_message_goes_to_the_user_where_the_template_takes_none(messages: list[Any], expected: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert render(WITHOUT_SYSTEM, system, *messages).startswith(f"<|im_start|>{expected}<|im_end|>")


CALLS = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
RESULTS: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ("b", "a")]
CALLING = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": CALLS}


def test_calls_get_a_message_each_with_its_result_where_the_template_takes_one() -> None:
    single = WITH_TOOLS.replace(
        "{% for c in", "{% if m.tool_calls | length > 1 %}{{ raise_exception('One!') }}{% endif %}{% for c in"
    )
    expected = "<user:hello><assistant:I look.><assistant:a{}><tool:of a><assistant:b{}><tool:of b>"
    assert render(single, HELLO, CALLING, *RESULTS) == expected
    together = "<user:hello><assistant:I look.a{}b{}><tool:of b><tool:of a>"
    assert render(WITH_TOOLS, HELLO, CALLING, *RESULTS) == together
    dropping = WITH_TOOLS.replace("m.tool_calls or []", "('' if m.content else m.tool_calls) or []")
    assert render(dropping, HELLO, CALLING, *RESULTS) == expected


def test_one_call_each_keeps_reasoning_with_the_first_call() -> None:
    assert one_call_each([HELLO, CALLING, *RESULTS, HELLO]) == [
        HELLO,
        {"role": "assistant", "content": "I look."},
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": CALLS[:1]},
        RESULTS[1],
        {"role": "assistant", "tool_calls": CALLS[1:]},
        RESULTS[0],
        HELLO,
    ]


def test_results_go_into_the_message_with_the_calls_where_the_template_reads_them() -> None:
    embedding = WITH_TOOLS.replace(
        "{{ m.content }}", "{{ m.content }}{{ m.tool_responses | tojson if m.tool_responses }}"
    )
    rendered = render(embedding, HELLO, CALLING, *RESULTS)
    assert '[{"name": "b", "response": "of b"}, {"name": "a", "response": "of a"}]' in rendered
    assert "<tool:" not in rendered


# As TranslateGemma's: one part with two languages, and nothing else.
TRANSLATING = """{% for m in messages %}{% if m.content is string or m.content | length != 1 %}
{{ raise_exception('One part.') }}{% endif %}{% set part = m.content[0] %}{% if not part.source_lang_code %}
{{ raise_exception('A language.') }}{% endif %}
{{ part.source_lang_code }} to {{ part.target_lang_code }}: {{ part.text }}{% endfor %}"""


def test_other_fields_of_parts_and_messages_reach_the_template() -> None:
    part = {"type": "text", "text": "Hallo", "source_lang_code": "de", "target_lang_code": "en"}
    assert "de to en: Hallo" in render(TRANSLATING, {"role": "user", "content": [part]})
    assert render("{{ messages[0].mood }}", {"role": "user", "content": "Hi", "mood": "calm"}) == "calm"


def test_tools_get_plain_schemas_only_for_a_template_that_fails_at_others() -> None:
    properties = {"a": {"type": ["null", "integer"], "description": None}, "b": True, "c": {"type": "object"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    shows = "{{ tools | tojson if tools }}{{ messages[0].content }}"
    assert '"type": ["null", "integer"]' in render(shows, HELLO, tools=[tool])
    fails = (
        "{% for t in tools or [] %}{% for p in t.function.parameters.properties.values() %}{{ p.type + '' if p.type }}"
    )
    plain = render(f"{fails}{{% endfor %}}{{% endfor %}}{shows}", HELLO, tools=[tool])
    expected = {"a": {"type": "integer"}, "b": {}, "c": {"type": "object", "additionalProperties": False}}
    assert f'"properties": {json.dumps(expected)}' in plain


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_a_template_that_needs_a_user_gets_an_empty_message(role: str) -> None:
    template = CHATML.replace(
        "{% for", "{{ raise_exception('x') if not messages | selectattr('role', 'eq', 'user') | list }}{% for", 1
    )
    assert "<|im_start|>user\n<|im_end|>" in render(template, {"role": role, "content": "Hm"})


def test_a_template_changes_its_own_copies_only() -> None:
    messages = [{"role": "user", "content": TWO}]
    changing = "{{ messages.append(messages[0]) }}{{ messages[0].update(role='x') }}" + STRING_OR_PARTS
    assert render(changing, *messages) == "NoneNone<x:onetwo><x:onetwo>"
    assert messages == [{"role": "user", "content": TWO}]
    assert len(TWO) == 2


@pytest.mark.parametrize(
    "name", ["messages", "tokenize", "chat_template", "add_generation_prompt", "conversation", "conversations", "self"]
)
def test_template_variables_cannot_stand_in_for_the_request(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{name}' cannot be set") as caught:
        render(CHATML, HELLO, template_kwargs={name: True})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["tools", "documents"])
@pytest.mark.parametrize("value", ["x", ["x"], 5, {"name": "f"}], ids=str)
def test_tools_and_documents_among_the_variables_are_lists_of_objects(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"'chat_template_kwargs.{name}': must be a list of objects") as caught:
        render(CHATML, HELLO, template_kwargs={name: value})
    assert caught.value.param == "chat_template_kwargs"
    assert "f" in render("{{ tools[0].name }}", HELLO, template_kwargs={"tools": "x"}, tools=[{"name": "f"}])


# Variables with the names of arguments, of what templates call, and of what Python and Jinja know themselves.
NAMES = st.sampled_from(
    [
        *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
        *("messages", "arguments", "args", "tojson", "raise_exception", "namespace", "loop", "caller", "range", "dict"),
        *("__class__", "strftime_now", "bos_token", "eos_token", "", "a b", "None", "context", "environment"),
    ]
)
DEPTHS = st.sampled_from([1, 100, 300, 900, 990, 1000, 50_000])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
DEEP = DEPTHS.map(lambda depth: reduce(lambda inner, _: {"a": inner}, range(min(depth, 1000)), "end"))
ARGUMENTS = st.one_of(
    st.text(),
    VALUES.map(json.dumps),
    DEPTHS.map(lambda depth: '{"a":' * depth + "1" + "}" * depth),
    st.sampled_from(['{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}", '{"a": NaN}', '{"a": 1e999}']),
)
CURIOUS = (  # This template reads every input, and quotes it in its error.
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}"
    "{% if call.function.arguments.a is string %}{{ raise_exception('no ' + call.function.arguments.a) }}{% endif %}"
    "{% endfor %}{{ m.name }}{{ m.content }}{% endfor %}{{ tools | tojson }}{{ documents }}{{ mood | tojson }}"
)
TEMPLATES = [Tokenizer(wrap(template)) for template in (CHATML, CURIOUS, ALTERNATING, STRING_OR_PARTS)]


@given(
    st.sampled_from(TEMPLATES),
    ARGUMENTS,
    st.dictionaries(NAMES | st.just("mood"), VALUES | DEEP, max_size=2),
    VALUES | DEEP,
    st.booleans(),
)
def test_whatever_a_template_gets_is_encoded_or_refused(
    tokenizer: Tokenizer, arguments: str, variables: dict[str, Any], odd: Any, ends_open: bool
) -> None:
    call = {"id": odd, "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [HELLO, {"role": "assistant", "content": "", "name": "é\x00", "tool_calls": [call, {"function": odd}]}]
    prompt = ChatPrompt(
        messages, template_kwargs=variables, add_generation_prompt=not ends_open, continue_final_message=ends_open
    )
    try:
        tokenizer.encode(prompt)
    except InvalidRequest as refused:
        body = refused.body(request_id="", trace_id="")
    else:
        return
    assert 0 < len(json.dumps(body, ensure_ascii=False).encode()) < 2000


def test_tool_arguments_that_are_nested_very_deeply_are_refused() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 50_000 + "]" * 50_000}}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        render(CHATML, {"role": "assistant", "content": "", "tool_calls": [call]})
