"""Chat templates as programs in Jinja, in a sandbox: they come with models, so they are not trusted.

Templates are written for transformers, so they get the same settings of Jinja, the same functions and the same names in
messages. These are implemented here because importing transformers takes longer than the rest of a start; tests compare
the two. A rendered text records which characters come from the template's source (`template_text.py`). This module must
not depend on tokens or requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import meta, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_mark_safe, sync_do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from oaiserve.engine.text.template_text import (
    BRACES,
    TemplateMarkup,
    TemplateText,
    by_template,
    escaped,
    filled,
    joined,
    markup,
    plain,
)
from oaiserve.gc_pause import thread_work_ns

Message = dict[str, Any]

# The names for a message's reasoning. Templates read the first one, except that those of gpt-oss read "thinking".
_REASONING = ("reasoning_content", "thinking", "reasoning")
_END_OF_CONTINUED = "OAISERVE_END_OF_CONTINUED_MESSAGE "  # Its space shows whether the template strips contents.

MOST_RENDER_NS = 1_000_000_000  # CPU time, not counting garbage collection
MOST_CHARACTERS = 2**24  # characters of the text, twice the default limit of a body


class TemplateLimit(TemplateError):
    """A template takes too much time or memory to render these messages."""


# The value of this thread's `thread_work_ns` at which rendering is given up
_end_ns: ContextVar[int] = ContextVar("end_ns")


def _check_time() -> None:
    if thread_work_ns() > _end_ns.get():
        raise TemplateLimit(f"it would take more than {MOST_RENDER_NS // 10**9} second")


class _GenerationBlocks(Extension):
    """The tag `{% generation %}`, which marks the model's text for training. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """The function `dict`, without access to the type's methods."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace, without names that begin with an underscore, which could be used to escape from the
    sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # A value may be named `self`.
        self, *arguments = args
        values = dict(*arguments, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"Chat templates cannot have names that begin with an underscore, such as {name!r}.")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """A replacement for Jinja's own filter, which escapes text for HTML. Generators from other filters become lists."""
    if isinstance(value, Iterator):
        value = list(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Indentation adds thousands of characters per value to deeply nested ones.
    if indent is None:
        return encoder.encode(value)
    return "".join(_counted_text(encoder.iterencode(value)))


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for number, item in enumerate(items):
        if number % 16 == 0:
            _check_time()
        yield item


def _counted_text(parts: Iterable[str]) -> Iterator[str]:
    num_characters = 0
    for part in _counted(parts):
        num_characters += len(part)
        if num_characters > MOST_CHARACTERS:
            raise TemplateLimit(f"its text would have more than {MOST_CHARACTERS} characters")
        yield part


@pass_eval_context
def _join(eval_ctx: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's filter, called so that the separator determines the type of the result."""
    return sync_do_join(eval_ctx, value, d if isinstance(d, TemplateText) else TemplateText(d), attribute)


class _Generator(CodeGenerator):
    """Compiles the texts in a template's source to `TemplateText` objects, and `~` to a call that joins its
    operands."""

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        self.write(self._literal(node.as_const(frame.eval_ctx)))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _literal(self, value: Any) -> str:
        """Return the code of a constant: of a text, or of another value that may contain texts."""
        if type(value) is str:
            texts = self.environment.texts  # type: ignore[attr-defined]
            texts.append(by_template(value))
            return f"environment.texts[{len(texts) - 1}]"
        if type(value) is dict:
            return f"{{{', '.join(f'{self._literal(key)}: {self._literal(one)}' for key, one in value.items())}}}"
        if type(value) is list:
            return f"[{', '.join(map(self._literal, value))}]"
        if type(value) is tuple:
            return f"({''.join(f'{self._literal(one)}, ' for one in value)})"
        return str(value) if isinstance(value, float) else repr(value)


class _Environment(SandboxedEnvironment):
    """Jinja's sandbox, which also counts loops and calls: long messages cause more of these, but not longer
    expressions.

    Templates may change lists and objects, as some do, because they get copies.
    """

    code_generator_class = _Generator
    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
        self.texts: list[TemplateText] = []  # the texts in the source
        self.filters |= {"tojson": _to_json, "join": _join, "safe": markup, "e": escaped, "escape": escaped}
        self.filters["_counted"] = _counted
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno, environment=self)
        return tree

    def wrap_str_format(self, value: Any) -> Any:
        form = getattr(value, "__self__", None)
        if isinstance(form, TemplateMarkup):
            value = getattr(do_mark_safe(plain(form)), value.__name__)
        wrapped = super().wrap_str_format(value)
        if wrapped is None or not isinstance(form, TemplateText) or value.__name__ != "format":
            return wrapped
        return lambda *values, **names: filled(form, BRACES, wrapped(*values, **names), values, names)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        return super().call(__context, __obj, *args, **kwargs)


class JinjaTemplate:
    def __init__(self, source: str) -> None:
        """Compile the template. Raises jinja2.TemplateSyntaxError."""
        self._source = source
        environment = _Environment()
        tree = environment.parse(source)
        self._variables = meta.find_undeclared_variables(tree)
        self._template = environment.from_string(tree)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of the messages. `variables` may contain tools and documents.

        Raises ValueError for messages that no template can render, and the template's own errors.
        """
        if not messages:
            raise ValueError("There are no messages.")
        if continue_final_message and add_generation_prompt:
            raise ValueError("The final message is either continued or answered, not both.")
        _end_ns.set(thread_work_ns() + MOST_RENDER_NS)
        prepared = [_prepared(message) for message in messages]
        values = {"tools": None, "documents": None, **variables}
        if {"functions", "datetime"} <= self._variables:  # FireFunction expects tools in this form.
            functions = [tool.get("function") for tool in values["tools"] or ()]
            values = {"functions": _to_json(functions, indent=4) if functions else "", **values}
            values = {"datetime": datetime.now().strftime("%b %d %Y"), **values}
        for name in ("tools", "documents"):
            if values[name] is not None and not all(isinstance(item, dict) for item in values[name]):
                raise ValueError(f"The {name} must be objects.")
        continued = self._tag_end(prepared) if continue_final_message else ""
        values |= {"messages": prepared, "add_generation_prompt": add_generation_prompt}
        text = joined(_counted_text(self._template.generate(values)))
        if not continue_final_message:
            return text
        tag = _END_OF_CONTINUED.strip()  # The template may have stripped the final message.
        if continued.strip() not in text or tag not in text:
            raise ValueError("The template leaves out the final message, or a part of it, so it cannot be continued.")
        end = text.rindex(tag)
        beginning = text[:end]
        if text[end:].startswith(_END_OF_CONTINUED):
            return beginning
        return beginning.rstrip()

    def _tag_end(self, messages: list[Message]) -> str:
        """Put an end tag after the final message's text, and return that text."""
        final = messages[-1]
        content = final.get("content")
        if content is None or "content" not in self._source:
            raise ValueError("The final message has no content that could be continued.")
        if isinstance(content, list):
            parts = [dict(part) for part in content]
            part = next((part for part in reversed(parts) if "text" in part), None)
            if part is None:
                raise ValueError("The final message has no text that could be continued.")
            text: str = part["text"]
            part["text"] = text + _END_OF_CONTINUED
            final["content"] = parts
        else:
            text = content
            final["content"] = content + _END_OF_CONTINUED
        return text


def _prepared(message: Mapping[str, Any]) -> Message:
    """Return a message without keys whose value is None, which templates would print, and with its reasoning under
    every name that templates read."""
    prepared = {key: value for key, value in message.items() if value is not None}
    reasoning = next((prepared[name] for name in _REASONING if name in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    return prepared
