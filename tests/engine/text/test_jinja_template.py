"""Templates render as transformers renders them, which models are trained with; the reference is its own renderer."""

import gc
from contextvars import Context
from time import thread_time_ns
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from oaiserve.engine.text import jinja_template
from oaiserve.engine.text.jinja_template import JinjaTemplate
from tests.engine.text.tokenizers_for_tests import CHATML

HELLO = {"role": "user", "content": "hello"}
EVERYTHING = """
{%- set ns = namespace(count=0, self=1) %}
{% for m in messages %}
  {% if loop.index0 > 4 %}{% break %}{% endif %}
  {% set ns.count = ns.count + 1 %}
    <{{ m.role }}{{ ns.count }}>{% generation %}{{ m.content | trim if m.content is string else m.content | tojson }}
{% endgeneration %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}
{% endfor %}
{{ tools | tojson(indent=2) if tools else "no tools" }}{{ documents }}{{ mood | default("none") }}{{ bos_token }}
{{- dict(a=1) | tojson }}{{ dict.fromkeys("ab") | tojson(sort_keys=True) }}{{ "é<" | tojson }}
{% if add_generation_prompt %}<assistant>{% endif %}
"""
PARTS = "{% for m in messages %}<{{ m.role }}:{% for part in m.content %}{{ part.text }}|{% endfor %}>{% endfor %}"
STRIPPING = "{% for m in messages %}<{{ m.role }}:{{ m.content | trim }}>{% endfor %}"


def by_transformers(source: str, messages: list[Any], variables: dict[str, Any], **options: bool) -> str:
    # As `apply_chat_template` prepares messages.
    with_values = [{key: value for key, value in message.items() if value is not None} for message in messages]
    (text,), _ = render_jinja_template([with_values], chat_template=source, **options, **variables)
    return text


TEXTS = st.text(alphabet=st.sampled_from("ab é<\n\t "), max_size=8)
CONTENTS = TEXTS | st.none() | st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]), "content": CONTENTS},
        optional={name: TEXTS | st.none() for name in ("reasoning_content", "thinking", "reasoning")},
    ),
    min_size=1,
    max_size=6,
)
VARIABLES = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.lists(st.dictionaries(TEXTS, st.integers()), max_size=2),
        "documents": st.lists(st.dictionaries(TEXTS, TEXTS), max_size=2),
        "mood": st.recursive(st.none() | st.booleans() | TEXTS, lambda inner: st.lists(inner, max_size=2)),
        "bos_token": st.just("<s>"),
    },
)


@given(st.sampled_from([CHATML, EVERYTHING, PARTS, STRIPPING]), MESSAGES, VARIABLES, st.booleans(), st.booleans())
def test_templates_render_as_in_transformers(
    source: str, messages: list[Any], variables: dict[str, Any], adds: bool, continues: bool
) -> None:
    options = {"add_generation_prompt": adds and not continues, "continue_final_message": continues}
    try:
        expected = by_transformers(source, messages, variables, **options)
    except Exception:
        with pytest.raises(Exception):  # noqa: B017, PT011 - a template can raise anything
            JinjaTemplate(source).render(messages, variables, **options)
    else:
        assert JinjaTemplate(source).render(messages, variables, **options) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ dict.mro() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ raise_exception.__globals__.a }}",
        "{{ strftime_now.__code__.a }}",
        "{% for a in range(10**12) %}{% endfor %}",
    ],
)
def test_templates_do_not_get_out_of_the_sandbox(source: str) -> None:
    for render in (lambda: JinjaTemplate(source).render([HELLO], {}), lambda: by_transformers(source, [HELLO], {})):
        with pytest.raises(Exception, match="unsafe|underscore|no attribute|undefined|too big"):
            render()


def test_tools_are_also_the_functions_of_firefunction() -> None:
    template = JinjaTemplate("{{ 'Tools:' + functions + datetime[-5:-3] }}")
    tools = [{"type": "function", "function": {"name": "add"}}]
    of_first_text = Context()  # No text has been rendered in it.
    text = of_first_text.run(template.render, [HELLO], {"tools": tools})
    assert text == 'Tools:[\n    {\n        "name": "add"\n    }\n] 2'
    assert template.render([HELLO], {"datetime": "1 May 1999"}) == "Tools: 1"


def test_no_messages_cannot_be_rendered() -> None:
    with pytest.raises(ValueError, match="no messages"):
        JinjaTemplate(CHATML).render([], {})
    with pytest.raises(ValueError, match="not both"):
        JinjaTemplate(CHATML).render([HELLO], {}, add_generation_prompt=True, continue_final_message=True)


INNER_LOOPS = "{% for m in messages %}{% for n in messages[loop.index:] %}{{ n.role[:0] }}{% endfor %}{% endfor %}"
RECURSION = "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(40) }}"
INDENTS = "{{ tools | tojson(indent=4) }}"


@pytest.mark.parametrize(
    ("source", "says"),
    [(INNER_LOOPS, "more than 1 second"), (RECURSION, "more than 1 second"), (INDENTS, "characters")],
)
def test_a_template_takes_at_most_its_time_and_its_text(
    source: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    def thread_work_ns() -> int:
        nonlocal reads
        reads += 1
        return reads * 10_000_000

    monkeypatch.setattr(jinja_template, "thread_work_ns", thread_work_ns)
    monkeypatch.setattr(jinja_template, "MOST_CHARACTERS", 10_000)
    deep: Any = ["x"]
    for _ in range(100):
        deep = [deep]
    with pytest.raises(jinja_template.TemplateLimit, match=says):
        JinjaTemplate(source).render([HELLO] * 300, {"tools": [{"name": deep}]})
    assert JinjaTemplate(source.replace("40", "2")).render([HELLO], {"tools": []}) is not None


def test_collections_of_garbage_are_no_time_of_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_template, "MOST_RENDER_NS", 10_000_000)
    examined = [[] for _ in range(100_000)]

    def collect() -> int:
        begin_ns = thread_time_ns()
        while thread_time_ns() < begin_ns + 3 * jinja_template.MOST_RENDER_NS:
            gc.collect()
        return len(examined)

    assert JinjaTemplate("{{ collect() }} {{ dict(a=1) }}").render([HELLO], {"collect": collect}) == "100000 {'a': 1}"
