"""Texts with the origin of their characters: which of them the chat template wrote, and which come from outside.

Text from outside, such as a message or a tool's schema, is an ordinary string. Text that a template writes itself is a
`TemplateText`, and so is a text that combines both. An operation through which characters cannot be traced returns an
ordinary string. So a gap in this file can turn a control token into text, but never text into a control token.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, SupportsIndex

from jinja2 import Undefined
from jinja2.filters import do_mark_safe

# Placeholders for values, for `format` and for `%`, if they can be traced. The other alternatives have no group.
BRACES = re.compile(r"\{(\w*)\}|[{}]")
PERCENT = re.compile(r"%(?:\((\w+)\)|())s|%")
# The results of these methods count as the template's if all texts involved do; otherwise they count as from outside.
_OF_WHOLE = (
    *("capitalize", "casefold", "center", "expandtabs", "ljust", "lower", "removeprefix", "removesuffix", "rjust"),
    *("swapcase", "title", "upper", "zfill", "__mul__", "__rmul__"),
)
_REFERENCES = (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ('"', "&#34;"))


class TemplateText(str):
    """A text of which the chat template wrote some characters. It compares, hashes and searches like any other
    string."""

    __slots__ = ("_bounds",)
    # Positions where the template's characters begin and end, alternately. Templates can't read names that begin with
    # "_".
    _bounds: Sequence[int]

    def __new__(cls, text: str, bounds: Sequence[int] = ()) -> Self:
        made = super().__new__(cls, text)
        made._bounds = bounds
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: object) -> str:
        if hasattr(other, "__html__") or isinstance(other, Undefined):  # Their __radd__ computes the sum.
            return NotImplemented
        return joined((self, other)) if isinstance(other, str) else str.__add__(self, other)  # type: ignore[operator]

    def __radd__(self, other: object) -> str:
        if not isinstance(other, str):
            return NotImplemented
        return joined((other, self))

    def __mod__(self, values: Any) -> str:
        text = str.__mod__(self, values)
        match values:
            case tuple():
                return filled(self, PERCENT, text, values, {})
            case Mapping():
                return filled(self, PERCENT, text, (values,), values)
            case _:
                return filled(self, PERCENT, text, (values,), {})

    def __getitem__(self, index: SupportsIndex | slice) -> str:
        text = str.__getitem__(self, index)
        places = range(len(self))[index] if isinstance(index, slice) else range(len(self))[index:][:1]
        if places.step != 1:
            return text
        start = places.start
        stop = start + len(text)
        first = bisect_right(self._bounds, start)
        last = bisect_left(self._bounds, stop)
        bounds = [*[start] * (first % 2), *self._bounds[first:last], *[stop] * (last % 2)] if text else []
        return type(self)(text, [bound - start for bound in bounds])

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        parts = []
        at = 0
        for part in str.split(self, sep, maxsplit):
            at = self.index(part, at) if sep is None else at
            parts.append(self[at : at + len(part)])
            at += len(part) + len(sep or "")
        return parts

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return joined(_between(new, self.split(old, count)))

    def join(self, parts: Iterable[str], /) -> str:
        texts = list(parts)
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"sequence item {number}: expected str instance, {type(text).__name__} found")
        return joined(_between(self, texts))


class TemplateMarkup(TemplateText):
    """A text that was declared safe or has been escaped. As with Jinja's markup, text that is added to it is
    escaped."""

    __slots__ = ()

    def __html__(self) -> str:
        return self

    def __str__(self) -> str:
        return TemplateText(plain(self), self._bounds)

    def __add__(self, other: object) -> str:
        return markup(joined((self, escaped(other)))) if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other: object) -> str:
        return markup(joined((escaped(other), self))) if isinstance(other, str) else NotImplemented

    def __mod__(self, values: Any) -> str:
        return markup(str(do_mark_safe(plain(self)) % values))


def _of_whole(name: str) -> Callable[..., Any]:
    native = getattr(str, name)

    def method(self: TemplateText, *args: Any, **named: Any) -> Any:
        text = native(self, *args, **named)
        texts = (each for each in (self, *args, *named.values()) if isinstance(each, str))
        if isinstance(text, str) and all(is_written(each, 0, len(each)) for each in texts):
            return by_template(text)
        return text

    method.__name__ = name
    return method


for _name in _OF_WHOLE:
    setattr(TemplateText, _name, _of_whole(_name))


def by_template(text: str) -> TemplateText:
    """Return a text marked as written by the template."""
    return TemplateText(text, (0, len(text)) if text else ())


def markup(value: Any) -> TemplateMarkup:
    """Return the text of a value, marked as one that needs no escaping."""
    text = value if isinstance(value, str) else str(value)
    return TemplateMarkup(plain(text), text._bounds if isinstance(text, TemplateText) else ())


def escaped(value: Any) -> TemplateMarkup:
    """Return the text of a value, with HTML's special characters escaped unless the value is markup."""
    if hasattr(value, "__html__"):
        return markup(value.__html__())
    text: str = TemplateText(plain(value), value._bounds) if isinstance(value, TemplateText) else str(value)
    for sign, reference in _REFERENCES:
        text = text.replace(sign, reference)
    return markup(text)


def is_written(text: str, start: int, end: int) -> bool:
    """Return whether the template wrote every character of a part of a text."""
    if start == end:
        return True
    bounds = text._bounds if isinstance(text, TemplateText) else ()
    place = bisect_right(bounds, start)
    return place % 2 == 1 and end <= bounds[place]


def outside(text: str) -> Iterator[tuple[int, int]]:
    """Yield the beginning and end of each part that the template did not write."""
    start = 0
    bounds = text._bounds if isinstance(text, TemplateText) else ()
    for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
        if begin > start:
            yield start, begin
        start = end
    if start < len(text):
        yield start, len(text)


def plain(text: str) -> str:
    """Return the text without the origin of its characters."""
    return str.__str__(text)


def joined(parts: Iterable[Any]) -> str:
    """Return the texts of values joined, with the origins of their characters."""
    texts: list[str] = []
    bounds: list[int] = []
    at = 0
    for part in parts:
        text = part if isinstance(part, str) else str(part)
        if at == 0 and isinstance(text, TemplateText):
            bounds = [*text._bounds]  # Some templates add each message to a text that grows long.
        elif isinstance(text, TemplateText) and text._bounds:
            first, *others = text._bounds
            if bounds and bounds[-1] == at + first:
                bounds.pop()
            else:
                bounds.append(at + first)
            bounds += [at + bound for bound in others]
        texts.append(text)
        at += len(text)
    whole = "".join(texts)
    return TemplateText(whole, bounds) if bounds else whole


def _between(separator: str, texts: Sequence[str]) -> list[str]:
    parts = [separator] * (2 * len(texts) - 1)
    parts[::2] = texts
    return parts


def filled(
    form: TemplateText, places: re.Pattern[str], text: str, values: Sequence[Any], names: Mapping[str, Any]
) -> str:
    """Return `text`, which is `form` with values in its places, with the origins of its characters if all places can be
    traced."""
    numbers = iter(range(len(values)))
    parts: list[Any] = []
    at = 0
    for match in places.finditer(form):
        name = next((group for group in match.groups() if group is not None), None)
        if name is None:
            return text
        parts.append(form[at : match.start()])
        at = match.end()
        if name in names:
            parts.append(names[name])
        else:
            number = int(name) if name.isdecimal() else next(numbers, len(values))
            parts.append(values[number] if number < len(values) else "")
    whole = joined((*parts, form[at:]))
    return whole if whole == text else text
