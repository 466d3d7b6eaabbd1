"""Histories of all kinds of messages and items, as `tests.histories` writes them, with two strict templates."""

from tests.histories.sending import attack, drawn
from tests.missing_plugins import has_plugin

# Templates that refuse much: they want turns, results after calls, and arguments that are objects.
TURNS = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message.content is not string %}{{ raise_exception('only strings') }}{% endif %}
{{- message.role }}: {{ message.content }}
{% endfor %}"""
OBJECTS = """\
{%- for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.parameters.properties | length }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' and messages[loop.index0 - 1].role not in ('assistant', 'tool') %}
{{- raise_exception('a result without a call') }}{% endif %}
{{- message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}</tool_call>
{%- endfor %}
{% endfor %}"""  # noqa: E501


def test_generated_histories_are_read_with_strict_templates() -> None:
    apis = [api for api in ("chat", "responses", "messages") if api == "chat" or has_plugin(api)]
    bodies = drawn(seed=11, number=25, apis=apis)
    num_sent, faults = attack({"turns": TURNS, "objects": OBJECTS}, bodies)
    assert num_sent > 33 * len(apis)
    assert faults == []
