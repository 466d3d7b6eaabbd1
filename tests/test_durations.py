"""The order of test files by the seconds that they took."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import durations

SHORT = "tests/test_cli.py"
LONG = "tests/test_config.py"
NEW = "tests/test_run.py"
DELETED = "tests/test_that_was_deleted.py"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path))
    committed = tmp_path / "committed.json"
    committed.write_text("{}")
    monkeypatch.setattr(durations, "COMMITTED", committed)
    return tmp_path / "tests/seconds.json"


def process(**fields: Any) -> Any:
    whole_suite = {"args_source": pytest.Config.ArgsSource.TESTPATHS, "option": SimpleNamespace(keyword="")}
    return SimpleNamespace(**whole_suite | fields)


def run(config: Any, *tests: tuple[str, float]) -> None:
    plugin = durations.Durations(config)
    for name, seconds in tests:
        report: Any = SimpleNamespace(nodeid=name, duration=seconds)
        plugin.pytest_runtest_logreport(report)
    session: Any = SimpleNamespace(config=config)
    plugin.pytest_sessionfinish(session)


def in_order(config: Any, *names: str) -> list[str]:
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    durations.Durations(config).pytest_collection_modifyitems(items)
    return [item.nodeid for item in items]


def test_files_that_took_longest_come_first_in_the_next_run() -> None:
    run(process(), (f"{SHORT}::test_a", 1.0), (f"{LONG}::test_b", 2.0), (f"{LONG}::test_c", 3.0))
    tests = [f"{NEW}::test_d", f"{SHORT}::test_a", f"{LONG}::test_b", f"{LONG}::test_c"]
    assert in_order(process(), *tests) == [tests[2], tests[3], tests[1], tests[0]]


def test_committed_seconds_count_for_files_that_this_machine_has_not_run() -> None:
    durations.COMMITTED.write_text(json.dumps({NEW: 9.0, SHORT: 9.0}))
    run(process(), (f"{SHORT}::test_a", 1.0), (f"{LONG}::test_b", 2.0))
    assert in_order(process(), SHORT, LONG, NEW) == [NEW, LONG, SHORT]


def test_all_processes_of_a_run_have_the_order_of_the_first() -> None:
    run(process(), (SHORT, 1.0), (LONG, 2.0))
    first = durations.Durations(process())
    node = SimpleNamespace(workerinput={})
    first.pytest_configure_node(node)
    run(process(), (SHORT, 3.0))
    assert in_order(process(workerinput=node.workerinput), SHORT, LONG) == [LONG, SHORT]
    assert in_order(process(), LONG, SHORT) == [SHORT, LONG]


@pytest.mark.parametrize(
    "part",
    [
        process(args_source=pytest.Config.ArgsSource.ARGS),
        process(option=SimpleNamespace(keyword="name")),
        process(workerinput={durations.IN_WORKER: {SHORT: 1.0}}),
    ],
    ids=["of named files", "of tests with a name", "of one process"],
)
def test_a_part_of_the_suite_is_not_kept(part: Any, cache: Path) -> None:
    run(part, (SHORT, 1.0))
    assert not cache.exists()


def test_deleted_files_are_dropped_and_others_remain() -> None:
    durations.keep({SHORT: 1.0, DELETED: 2.0})
    durations.keep({LONG: 3.0})
    assert durations.known() == {SHORT: 1.0, LONG: 3.0}


def test_a_damaged_file_is_written_again(cache: Path) -> None:
    run(process(), (SHORT, 1.0))
    cache.write_text("{")
    assert durations.known() == {}
    run(process(), (LONG, 2.0))
    assert durations.known() == {LONG: 2.0}
