"""Tests the families of json_rows, tagged_rows and headed_calls: recognition, whole answers, pieces, and efforts."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.text.chat_template import ChatTemplate
from oaiserve.plugins.dialects import headed_calls, json_rows, tagged_rows
from oaiserve.plugins.dialects.headed_calls import SOLAR
from oaiserve.plugins.dialects.json_rows import APERTUS, APRIEL, COHERE, GIGACHAT, GIGACHAT31, NEMOTRON
from oaiserve.plugins.dialects.tagged_rows import HUNYUAN, HUNYUAN_OPEN, KIMI_K3, MINICPM, MINIMAX_M3, MUSE
from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.reasoning import THINK, ReasoningMode, ThinkingParser
from tests.plugins.dialects.known import dialect_of, family_of
from tests.routes.dialects.reading import TOOLS, Read, cut, cuts, own_form, read, segments_of
from tests.routes.doubles import FakeTemplate

FAMILIES = [
    family
    for module in (json_rows, tagged_rows, headed_calls)
    for family in vars(module).values()
    if isinstance(family, CallFamily)
]
CALL = '{"name": "get_time", "arguments": {"zone": "utc"}}'
CALLED = [("get_time", '{"zone": "utc"}')]
NS = "]<]minimax[>["


def reader(family: CallFamily, *, is_open: bool = False) -> AnswerReader:
    mode = ReasoningMode(family.reasoning_tags or THINK, is_open)
    return AnswerReader(ThinkingParser(mode, partial(family.parser, TOOLS)), family.parser(TOOLS))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.name}-{family.signs[-1]}")
def test_a_template_with_its_signs_is_of_the_family(family: CallFamily) -> None:
    assert family_of("auto", "\n".join(family.signs)) is family
    assert family_of(family.name, "\n".join(family.signs)) is family


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("Use '<TOOLCALL>[' for <tool_call>.", NEMOTRON),
        ("{{ '<tool_sep{}>'.format(S) }}<arg_key{}><tool_call{}>", HUNYUAN),
        ("{% set S = ':opensource' %}{{ '<tool_sep{}>'.format(S) }}<arg_key{}>", HUNYUAN_OPEN),
        ("<|message_sep|><|function_call|> function call", GIGACHAT31),
        ("<|message_sep|>function call", GIGACHAT),
        ('<tool_sep><function name="a"><param name="b">', MINICPM),
    ],
)
def test_a_family_is_recognised_beside_signs_of_others(source: str, family: CallFamily) -> None:
    assert family_of("auto", source) is family


ANSWERS: list[tuple[CallFamily, bool, str, Read]] = [
    (COHERE, True, "Let me see.<|END_THINKING|><|START_RESPONSE|>It is late.<|END_RESPONSE|>",
     Read("It is late.", "Let me see.")),
    (COHERE, False, '<|START_THINKING|>Clock.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": '
     '"get_time", "parameters": {"zone": "utc"}}\n]<|END_ACTION|>', Read("", "Clock.", CALLED)),
    (NEMOTRON, True, f"Clock.\n</think>\n\n<TOOLCALL>[{CALL}]</TOOLCALL>", Read("", "Clock.\n", CALLED)),
    (APRIEL, True, f"A step.\n[BEGIN FINAL RESPONSE]\n<tool_calls>[{CALL}]</tool_calls>",
     Read("", "A step.\n", CALLED)),
    (APRIEL, False, "Here are my reasoning steps:\nOne.\n[BEGIN FINAL RESPONSE]\nTwo.\n[END FINAL RESPONSE]",
     Read("Two.\n", "One.\n")),
    (APERTUS, False, '<|inner_prefix|>Clock.<|inner_suffix|><|tools_prefix|>[{"get_time": {"zone": "utc"}}]'
     "<|tools_suffix|>", Read("", "Clock.", CALLED)),
    (HUNYUAN_OPEN, True, "Clock.</think:opensource>Wait.<tool_calls:opensource>\n<tool_call:opensource>get_time"
     "<tool_sep:opensource>\n<arg_key:opensource>zone</arg_key:opensource>\n<arg_value:opensource>utc"
     "</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>", Read("Wait.", "Clock.", CALLED)),
    (MINICPM, True, 'Clock.</think><function name="get_time"><param name="zone">utc</param></function>',
     Read("", "Clock.", CALLED)),
    (KIMI_K3, True, "The response tag.<|close|>think<|sep|><|open|>response<|sep|>Near think, message.<|close|>response"
     "<|sep|><|close|>message<|sep|>", Read("Near think, message.", "The response tag.")),
    (KIMI_K3, True, "Clock.<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
     '<|open|>call tool="get_time" index="1"<|sep|><|open|>argument key="zone" type="string"<|sep|>utc<|close|>argument'
     "<|sep|><|close|>call<|sep|><|close|>tools<|sep|>", Read("", "Clock.", CALLED)),
    (MINIMAX_M3, False, "</mm:think>It is late.", Read("It is late.")),
    (MINIMAX_M3, False, f'<mm:think>Clock.</mm:think>{NS}<tool_call>\n{NS}<invoke name="get_time">{NS}<zone>utc{NS}'
     f"</zone>{NS}</invoke>\n{NS}</tool_call>", Read("", "Clock.", CALLED)),
    (MUSE, False, ' to=self<|message|>Not <atem:invoke name="add"> yet.<|eom|><|start|>assistant to=user<|message|>'
     "Late.<|eot|>", Read("Late.", 'Not <atem:invoke name="add"> yet.')),
    (MUSE, False, " to=self<|message|>Clock.<|eom|><|start|>assistant to=user<|message|>Wait.<|eom|><|start|>assistant "
     'to=get_time<|message|><atem:function_calls>\n<atem:invoke name="get_time">\n<atem:parameter name="zone">utc'
     "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>", Read("Wait.", "Clock.", CALLED)),
    (MUSE, False, " to=self<|message|><|message|>Clock.<|eom|><|start|>assistant to=user<|message|><|message|>\n"
     "<|message|> Wait <|message|>.<|eom|><|start|>assistant to=get_time<|message|><|message|><atem:function_calls>\n"
     '<atem:invoke name="get_time">\n<atem:parameter name="zone">utc</atem:parameter>\n</atem:invoke>\n'
     "</atem:function_calls>", Read(" Wait <|message|>.", "Clock.", CALLED)),
    (MUSE, False, " to=self<|message|>Clock.<|eom|><|start|>assistant to=user<|message|><|message|> <|mess",
     Read(" <|mess", "Clock.")),
    (MUSE, True, "<|message|>Clock.<|eom|><|start|>assistant to=user<|message|> ", Read(" ", "Clock.")),
    (SOLAR, False, "<|think|>Clock.<|end|><|begin|>assistant<|content|>It is late.<|end|>",
     Read("It is late.", "Clock.")),
    (SOLAR, False, "<|think|>Clock.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>"
     'get_time<|tool_call:args|>{"zone": "utc"}<|tool_call:end|><|calls|>', Read("", "Clock.", CALLED)),
]  # fmt: skip


@pytest.mark.parametrize(("family", "is_open", "text", "expected"), ANSWERS)
def test_answers_are_read_whole_and_cut_at_every_character(
    family: CallFamily, is_open: bool, text: str, expected: Read
) -> None:
    assert read(segments_of(reader(family, is_open=is_open), [text])) == expected
    assert read(segments_of(reader(family, is_open=is_open), text)) == expected
    for at in range(1, len(text)):
        assert read(segments_of(reader(family, is_open=is_open), [text[:at], text[at:]])) == expected


def snippets(family: CallFamily) -> list[str]:
    parser = family.parser
    written = family.written([("get_time", '{"zone": "utc"}'), ("add", '{"a": 1}')])
    tags = [*parser.opening_tags, *parser.closing_tags, *parser.hidden_tags, *(family.reasoning_tags or THINK)]
    own = own_form(family, "add", {"a": 1, "text": "x"})
    return [
        *tags,
        *(tag[:-1] for tag in tags),
        written,
        written[:-3],
        own,
        own[:-9],
        own[9:],
        " ",
        "\n",
        "text",
        "get_time",
    ]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.name}-{family.signs[-1]}")
@given(data=st.data(), places=cuts(), is_open=st.booleans(), is_cut=st.booleans())
def test_segments_do_not_depend_on_the_pieces(
    family: CallFamily, data: st.DataObject, places: list[int], is_open: bool, is_cut: bool
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(snippets(family)) | st.text(max_size=2), max_size=8)))
    whole = segments_of(reader(family, is_open=is_open), [text], is_cut=is_cut)
    assert segments_of(reader(family, is_open=is_open), cut(text, places), is_cut=is_cut) == whole
    assert segments_of(reader(family, is_open=is_open), text, is_cut=is_cut) == whole


def test_a_call_cut_behind_its_name_has_no_arguments_yet() -> None:
    text = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_time", '
    for pieces in ([text], list(text)):
        assert read(segments_of(reader(COHERE), pieces, is_cut=True)) == Read(calls=[("get_time", "")])
        assert read(segments_of(reader(COHERE), pieces)) == Read(text)
    unknown = text.replace("get_time", "swim")
    assert read(segments_of(reader(COHERE), [unknown], is_cut=True)) == Read(unknown)


def dialect(source: str) -> Dialect:
    template = ChatTemplate(f"{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{source}", {})
    return dialect_of("auto", "auto", template, {})


HY3 = """{% if reasoning_effort is not defined %}{% set reasoning_effort = 'no_think' %}
{% elif reasoning_effort not in ['no_think', 'low', 'high'] %}{{ raise_exception('no such effort') }}{% endif %}
{% if add_generation_prompt %}<think>{% if reasoning_effort == 'no_think' %}</think>{% endif %}{% endif %}
{# <tool_sep> <arg_key> #}"""
K3 = """{% if thinking is not defined %}{% set thinking = true %}{% endif %}
{% if thinking and thinking_effort is defined and thinking_effort not in ['low', 'high', 'max'] %}
{{ raise_exception('no such effort') }}{% endif %}{% if tool_choice == 'none' %}{% endif %}
{% if add_generation_prompt %}<|open|>{{ 'think' if thinking else 'response' }}<|sep|>{% endif %}{# argument #}"""
M3 = f"""{{% if add_generation_prompt %}}{{% if thinking_mode == "enabled" %}}<mm:think>
{{% elif thinking_mode == "disabled" %}}</mm:think>{{% endif %}}{{% endif %}}{{# {NS} <invoke name= #}}"""


@pytest.mark.parametrize(
    ("source", "effort", "variables", "is_open"),
    [
        (HY3, None, {}, False),
        (HY3, "none", {"reasoning_effort": "no_think"}, False),
        (HY3, "minimal", {"reasoning_effort": "low"}, True),
        (HY3, "medium", {"reasoning_effort": "high"}, True),
        (K3, None, {}, True),
        (K3, "none", {"thinking": False}, False),
        (K3, "low", {"thinking_effort": "low"}, True),
        (K3, "xhigh", {"thinking_effort": "max"}, True),
        (M3, None, {}, False),
        (M3, "none", {"thinking_mode": "disabled"}, False),
    ],
)
def test_efforts_are_those_that_the_template_names(
    source: str, effort: str | None, variables: dict[str, Any], is_open: bool
) -> None:
    reasoning = dialect(source).reasoning
    assert reasoning is not None
    assert reasoning.by_effort(effort) == (variables, None)
    assert reasoning.of_request(variables).is_open == is_open


def test_reasoning_is_turned_on_in_the_templates_words() -> None:
    reasoning = dialect(M3).reasoning
    assert reasoning is not None
    assert reasoning.switched(on=True) == {"thinking_mode": "enabled"}
    assert reasoning.of_request({"thinking_mode": "enabled"}).is_open


def test_models_that_reason_first_do_so_before_a_forced_call() -> None:
    for family in (SOLAR, MUSE):
        reasoning = dialect("\n".join(family.signs)).reasoning
        assert reasoning is not None
        assert family.reasoning_tags is not None
        opening = family.reasoning_tags[0]
        assert reasoning.of_request({}, must_end=True) == ReasoningMode(family.reasoning_tags, True, opening)


def test_special_tokens_within_a_tag_are_visible() -> None:
    ids = {"<|open|>": 1, "<|close|>": 2, "<|sep|>": 3, "<|other|>": 4}
    chosen = dialect_of("kimi_k3", "auto", FakeTemplate("tools"), ids)  # type: ignore[arg-type]
    assert chosen.visible_ids(calls=False, reasoning=False) == {1, 2, 3}
