"""Values that fit a JSON schema, nearly fit it, or do not fit at all, as strategies of hypothesis.

The schemas are those that the server publishes, so they follow the code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

MOST_ITEMS = 4
EDGES = st.sampled_from(
    [0, 1, -1, 2, 128, 129, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 0.0, -0.0, 0.5, 1.0, 2.0,
     1e-320, 1e308, -1e308, 1.5]
)  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["", "\0", "\u202e", "<|im_end|>", "x" * 5000, "e\u0301", "\ufeff", "user", "text", "demo"]
)
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | EDGES | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=MOST_ITEMS) | st.dictionaries(TEXT, inner, max_size=MOST_ITEMS),
    max_leaves=6,
)
Schema = Mapping[str, Any]
Drawn = TypeVar("Drawn")


def bodies(document: Schema) -> dict[str, str]:
    """Return the names of the schemas of bodies in JSON, by the path that they are sent to."""
    names = {}
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if body := content.get("application/json"):
            names[path] = body["schema"]["$ref"].rpartition("/")[2]
    return names


def for_each(use: Callable[[Drawn], object], values: st.SearchStrategy[Drawn], from_seed: int, number: int) -> None:
    """Call a function with values, as a function of the seed. If it raises, it is called last with the smallest value
    for which it does."""

    @seed(from_seed)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(values)
    def call(value: Drawn) -> None:
        use(value)

    call()


def drawn(values: st.SearchStrategy[Drawn], from_seed: int, number: int) -> list[Drawn]:
    """Return a number of values, as a function of the seed."""
    values_drawn: list[Drawn] = []
    for_each(values_drawn.append, values, from_seed, number)
    return values_drawn


def fitting(
    document: Schema, name: str, fixed: Mapping[str, st.SearchStrategy[Any]] | None = None
) -> st.SearchStrategy[Any]:
    """Return objects that have the schema of this name in a published document. `fixed` has strategies for fields for
    which any value is too many."""
    schemas = document["components"]["schemas"]
    return _object(schemas[name], schemas, fixed or {})


def mutated(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return objects of which a few fields, known ones or new ones, have any value."""

    def change(value: dict[str, Any]) -> st.SearchStrategy[Any]:
        names = (st.sampled_from(sorted(value)) | TEXT) if value else TEXT
        changes = st.dictionaries(names, ANYTHING, min_size=1, max_size=3)
        return changes.map(lambda changed: value | changed)

    return values.flatmap(change)


_referred: dict[tuple[int, str], st.SearchStrategy[Any]] = {}  # by the definitions, and the name in them


def _value(schema: Schema, definitions: Schema) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if (id(definitions), name) not in _referred:
            # Later, because it may refer to itself.
            _referred[id(definitions), name] = st.deferred(lambda: _value(definitions[name], definitions))
        return _referred[id(definitions), name]
    if "anyOf" in schema:
        return st.one_of(*(_value(each, definitions) for each in schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return st.one_of(*(_value({**schema, "type": each}, definitions) for each in kind))
    match kind:
        case "string" if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True)
        case "string":
            return TEXT.filter(lambda text: _is_within(len(text), schema, "minLength", "maxLength"))
        case "integer":
            low = schema.get("minimum", -(2**70))
            high = schema.get("maximum", 2**70)
            edges = st.sampled_from([low, high, max(low, min(high, 1))])
            return edges | st.integers(low, min(high, max(low, 0) + 200))
        case "number":
            return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            least = schema.get("minItems", 0)
            return st.lists(_value(schema.get("items", {}), definitions), min_size=least, max_size=MOST_ITEMS)
        case "object" if "properties" in schema:
            return _object(schema, definitions, {})
        case "object":
            inner = schema.get("additionalProperties", {})
            names = TEXT.filter(lambda name: _is_within(len(name), schema.get("propertyNames", {}), "", "maxLength"))
            return st.dictionaries(names, _value(inner if isinstance(inner, dict) else {}, definitions), max_size=3)
    return ANYTHING


def _is_within(length: int, schema: Schema, least: str, most: str) -> bool:
    return schema.get(least, 0) <= length <= schema.get(most, length)


def _object(
    schema: Schema, definitions: Schema, fixed: Mapping[str, st.SearchStrategy[Any]]
) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with the required and the fixed fields, and a few of the others."""
    needed = set(schema.get("required", ())) | set(fixed)
    values = {name: fixed[name] if name in fixed else _value(each, definitions) for name, each in
              schema["properties"].items()}  # fmt: skip
    others = sorted(values.keys() - needed)
    names = st.lists(st.sampled_from(others), unique=True, max_size=3) if others else st.just([])
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({name: values[name] for name in (*sorted(needed), *chosen)})
    )
