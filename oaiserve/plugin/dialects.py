"""Names for plug-ins with `dialects`: how models write calls of tools.

A dialect is a `CallFamily`. Its parser is most often a subclass of one of these: `JsonCallParser` for an object between
tags, `ListedCalls` for a list of objects, `NamedCalls` for a name before the object, `TaggedCalls` for a tag around
each argument, and `UntaggedCalls` for objects without tags. `CallParser` is the base of all. The docstring of
`oaiserve.routes.dialects` follows a call through one.

>>> class OwlCalls(ListedCalls):
...     opening_tags = ("<owl>",)
...     closing_tags = ("</owl>",)
...     tags = ("<owl>", "</owl>")
>>> owl = CallFamily("owl", OwlCalls, separator=", ", before="<owl>[", after="]</owl>", signs=("<owl>",))
>>> text = owl.written([("get_time", '{"zone": "utc"}')])
>>> text
'<owl>[{"name": "get_time", "arguments": {"zone": "utc"}}]</owl>'

A parser turns pieces of text into segments: `Content`, `Reasoning`, and for a call `CallBegin`, `Arguments` and
`CallEnd`, or `CallBroken`:

>>> OwlCalls({"get_time": {}}).push("Well." + text)
[Content(text='Well.'), CallBegin(name='get_time'), Arguments(text='{"zone": "utc"}'), CallEnd()]

>>> parser = OwlCalls({"get_time": {}})
>>> parser.push('<owl>[{"name": "get_time", "arguments": {"zo')
[CallBegin(name='get_time'), Arguments(text='{"zo')]
>>> parser.finish(is_cut=False)
[CallBroken(text='<owl>[{"name": "get_time", "arguments": {"zo')]

All parsers have these methods, and a parser that reads a model's thinking also yields it:

>>> parsers = (JsonCallParser, ListedCalls, NamedCalls, TaggedCalls, UntaggedCalls)
>>> all(issubclass(parser, CallParser) for parser in parsers)
True
>>> Reasoning("It is late.").text
'It is late.'
"""

from oaiserve.routes.dialects.calls import CallParser
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.json_calls import JsonCallParser, ListedCalls, NamedCalls
from oaiserve.routes.dialects.segments import Arguments, CallBegin, CallBroken, CallEnd, Content, Reasoning
from oaiserve.routes.dialects.tagged_calls import TaggedCalls
from oaiserve.routes.dialects.untagged_calls import UntaggedCalls

__all__ = [
    "Arguments",
    "CallBegin",
    "CallBroken",
    "CallEnd",
    "CallFamily",
    "CallParser",
    "Content",
    "JsonCallParser",
    "ListedCalls",
    "NamedCalls",
    "Reasoning",
    "TaggedCalls",
    "UntaggedCalls",
]
