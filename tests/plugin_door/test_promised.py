"""What plug-ins can rely on: few names, each with a docstring and an example, and a plug-in that was written for it."""

import doctest
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.plugin_loading import load
from tests.plugin_door.imports import PUBLIC
from tests.routes.doubles import FakeEngine, FakeTelemetry, FakeTemplate
from tests.world.serving import Place

WHEEL = Path(__file__).parent / "oaiserve_haiku-1.0-py3-none-any.whl"
MODULES = [import_module(name) for name in PUBLIC]


def examples_of(module: ModuleType) -> str:
    """Return the code of the examples, and what it prints, in the docstrings of a module and of its public names."""
    finder = doctest.DocTestFinder(recurse=False)
    documented = [(module, module.__name__), *((getattr(module, name), name) for name in module.__all__)]
    tests = [test for value, name in documented for test in finder.find(value, name) if value.__doc__]
    return "".join(example.source + example.want for test in tests for example in test.examples)


def test_plugins_are_promised_at_most_forty_names_in_five_modules() -> None:
    assert len(MODULES) <= 5
    assert sum(len(module.__all__) for module in MODULES) <= 40


@pytest.mark.parametrize("module", MODULES, ids=PUBLIC)
def test_each_promised_name_is_described(module: ModuleType) -> None:
    described = module.__doc__ or ""
    assert [name for name in module.__all__ if not getattr(module, name).__doc__ and f"`{name}`" not in described] == []


@pytest.mark.parametrize("module", MODULES, ids=PUBLIC)
def test_each_promised_name_is_in_an_example_that_runs(module: ModuleType) -> None:
    examples = examples_of(module)
    assert [name for name in module.__all__ if not re.search(rf"\b{name}\b", examples)] == []
    assert doctest.testmod(module).failed == 0


def test_a_plugin_that_was_written_for_this_door_still_works(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel stays as it was built, whatever becomes of oaiserve."""
    monkeypatch.syspath_prepend(str(WHEEL))
    (haiku,) = (each for each in load() if each.plugin.name == "haiku")
    assert haiku.source == "oaiserve-haiku 1.0"
    assert [family.name for family in haiku.plugin.dialects] == ["leaf"]
    engine = FakeEngine(FakeTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"), runtime=place.world)
    telemetry = FakeTelemetry(place.world)
    app = create_app(Config("demo"), engine, telemetry, plugins=[haiku.plugin], runtime=place.world)  # type: ignore[arg-type]
    with place.running(app) as url, place.plain(url) as http:
        answer = http.post("/v1/haiku", json={"topic": "autumn"})
        assert (answer.status_code, answer.json()) == (200, {"haiku": "Hello world"})
        assert telemetry.shown["haiku_written_total"]() == {("127.0.0.1",): 1}
