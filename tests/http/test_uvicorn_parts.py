"""A new uvicorn may change the parts that oaiserve uses without a promise: these tests name what has changed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import uvicorn

from oaiserve.http import connection, server
from oaiserve.http.connection import Connection
from oaiserve.http.server import Server
from oaiserve.http.uvicorn_parts import USED, HttpToolsProtocol

BASES: dict[type, type] = {Connection: HttpToolsProtocol, Server: uvicorn.Server}
# Expressions in our code that have an object of uvicorn, and the name of its class.
OBJECTS = {
    **dict.fromkeys(("cycle", "running", "self.cycle", "self._running"), "RequestResponseCycle"),
    "self.config": "Config",
    "self.flow": "FlowControl",
    "self.lifespan": "LifespanOn",
    "self.server_state": "ServerState",
}


def test_the_installed_uvicorn_has_what_is_used_of_it() -> None:
    missing = [f"{owner.__name__}.{name}" for owner, names in USED.items() for name in names - attributes(owner)]
    assert sorted(missing) == [], f"uvicorn {uvicorn.__version__} has no longer {', '.join(sorted(missing))}"


def test_replaced_methods_of_uvicorn_take_the_same_arguments() -> None:
    changed = [
        f"{base.__name__}.{name}{inspect.signature(vars(base)[name])}"
        for ours, base in BASES.items()
        for name in vars(ours).keys() & vars(base).keys() & USED[base]
        if [*inspect.signature(vars(ours)[name]).parameters] != [*inspect.signature(vars(base)[name]).parameters]
    ]
    assert changed == [], f"uvicorn {uvicorn.__version__} calls these with other arguments: {', '.join(changed)}"


def test_the_list_of_used_parts_is_that_of_our_code() -> None:
    assert used() == {owner.__name__: names for owner, names in USED.items()}


def attributes(owner: type) -> set[str]:
    """Return the names of methods and attributes, also of those that only `__init__` or another method assigns."""
    names = {*dir(owner)}
    for base in owner.__mro__:
        if base.__module__.startswith("uvicorn."):
            names |= stored(ast.parse(textwrap.dedent(inspect.getsource(base))))
    return names


def stored(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def used() -> dict[str, set[str]]:
    """Return the attributes of uvicorn's objects that our code mentions, by class."""
    names: dict[str, set[str]] = {owner.__name__: set() for owner in USED}
    for module, (ours, base) in zip((connection, server), BASES.items(), strict=True):
        tree = ast.parse(Path(module.__file__).read_text())
        inherited = {name for name in attributes(base) | USED[base] if not name.startswith("__")}
        names[base.__name__] |= vars(ours).keys() & inherited
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                value = ast.unparse(node.value)
                if value in OBJECTS:
                    names[OBJECTS[value]].add(node.attr)
                elif value in ("self", "super()") and node.attr in inherited:
                    names[base.__name__].add(node.attr)
    return names
