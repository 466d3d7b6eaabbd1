"""Settings and hooks for all tests."""

import asyncio
import dataclasses
import functools
import gc
import inspect
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, control, core, settings
from tqdm import tqdm

from oaiserve import system_cpus
from oaiserve.interpreter import MOST_NEW_OBJECTS
from tests import durations, rewriting
from tests.e2e import browser
from tests.missing_plugins import ignored_without_plugins, skip_without_plugins

# Triton's kernels run in its interpreter, on the CPU. The variable must be set before torch imports Triton.
os.environ["TRITON_INTERPRET"] = "1"

# Processes of tests take all cores, and small models are no faster with more threads. Those of torch in several
# processes would wait for each other, and burn the cores meanwhile. Servers that tests start inherit the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Small models of transformers are read no faster by four threads, and no thread need watch the bars of their progress.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
tqdm.monitor_interval = 0
# Without `cpu_threads`, an engine would give torch a thread for each core, in all tests after it, too.
system_cpus.allowed_cpus = lambda: [0]

# Servers and workers that tests start import what the tests have imported, so nobody compiles it a second time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What is imported stays: nobody looks for garbage in it, neither now nor after all tests have been collected.
gc.disable()

# In a fresh checkout the first example builds tables, and machines are shared, so slow examples are not failures.
# They are the same in each run, so a change is to blame for what fails: `--hypothesis-profile explore` tries others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("oaiserve", settings.get_profile("explore"), derandomize=True)
settings.load_profile("oaiserve")

# For each example, Hypothesis would save, seed and restore the global generators of `random` and NumPy, and compare
# their states around each value that it draws. Nothing that its tests call draws from these generators.
core.deterministic_PRNG = control.deprecate_random_in_strategy = lambda *_: nullcontext()


collect_ignore = ignored_without_plugins()
# What commands and servers set up for their whole process; "" is the root.
LOGGERS = (
    *("", "oaiserve", "oaiserve.checkpoints.progress", "opentelemetry.trace.span"),
    *("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"),
)


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restore the loggers of the process after each test."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers[:], logger.level, logger.propagate, logger.disabled) for logger in loggers]
    disabled_level = logging.root.manager.disable
    yield
    if logging.root.manager.disable != disabled_level:
        logging.disable(disabled_level)
    for logger, (handlers, level, propagate, disabled) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        if logger.level != level:  # Setting it clears a cache in each of a thousand loggers.
            logger.setLevel(level)
        logger.propagate = propagate
        logger.disabled = disabled


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    """Restore the number of torch's threads after each test, so that no test slows down the tests after it."""
    before = torch_threads()
    yield
    if before != torch_threads():
        sys.modules["torch"].set_num_threads(before)


def torch_threads() -> int:
    """Return the number of threads that torch uses, or will use once a test imports it."""
    torch = sys.modules.get("torch")
    threads: int = int(os.environ["OMP_NUM_THREADS"]) if torch is None else torch.get_num_threads()
    return threads


class Group(NamedTuple):
    """The tests with a marker, which need programs that may not be installed."""

    marker: str
    what: str
    programs: tuple[str, ...]  # each a name, or several names with " or " between them
    source: str  # as people install the programs

    @property
    def missing(self) -> list[str]:
        return [program for program in self.programs if not any(map(shutil.which, program.split(" or ")))]

    @property
    def skip_reason(self) -> str:
        return f"not installed: {', '.join(self.missing)}"


GROUPS = (
    Group("prometheus", "ask a real Prometheus", ("prometheus", "promtool"), "apt-get install prometheus"),
    Group("browser", "open the live page in a browser", (" or ".join(browser.PROGRAMS),), "apt-get install chromium"),
    Group("compiler", "run the native step", ("g++",), "apt-get install g++"),
    Group("openssl", "make certificates", ("openssl",), "apt-get install openssl"),
    Group("helm", "render the chart", ("helm",), "a package of npm, as in .ci/run"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Share the rewriting of test files between processes, and sort the tests by the seconds that their files took."""
    config.pluginmanager.register(rewriting.Rewriting(config))
    config.pluginmanager.register(durations.Durations(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests whose plug-ins are missing or programs not installed."""
    skip_without_plugins(items)
    for group in GROUPS:
        if group.missing:
            for item in items:
                if item.get_closest_marker(group.marker):
                    item.add_marker(pytest.mark.skip(reason=group.skip_reason))


@pytest.fixture
def world() -> Iterator[Any]:
    """A simulated world, which is the event loop of a test that is a coroutine function."""
    from tests.world.loop import World, on_one_thread  # imports half of the server

    world = World(int(os.environ.get("SEED", "0")))
    with on_one_thread(world):
        yield world


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function on an event loop of its own, which is its `world` if it asks for one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run = arguments["world"].run_until_complete if "world" in arguments else asyncio.run
    run(asyncio.wait_for(pyfuncitem.obj(**arguments), 60))
    return True


def pytest_collection_finish() -> None:
    """Get ready for the tests, when all that they need has been imported."""
    gc.freeze()  # without a collection, which would take a second and find little
    gc.set_threshold(MOST_NEW_OBJECTS)  # as in a server
    gc.enable()
    # A load test calls this at its end. Full collections would then take a second each, for a million objects.
    gc.unfreeze = lambda: None
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is not None:
        patch_once(interpreter)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a file, collect its garbage and look at nothing of the rest again.

    Reports, caches and imports of thousands of tests add up, so full collections would soon take a second each.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def patch_once(interpreter: Any) -> None:
    """Leave out work of Triton's interpreter that takes most of its time and changes no result.

    It would replace the functions of its language in each launch, and in each call of a function within one. It would
    compute sums and products of integers a second time to look for overflows, which it reports only in debug mode. It
    would make a table of all types for each look-up in it.
    """
    patch: Callable[..., object] = interpreter._patch_lang

    @functools.cache
    def patch_for(function: Callable[..., object]) -> SimpleNamespace:
        patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_for
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    np_dtype: Callable[[Any], object] = interpreter._get_np_dtype
    by_name: dict[str, object] = {}

    def np_dtype_of(dtype: Any) -> object:
        if dtype.name not in by_name:
            by_name[dtype.name] = np_dtype(dtype)
        return by_name[dtype.name]

    interpreter._get_np_dtype = np_dtype_of


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many tests were left out. They are counted in the reports, which come from all worker processes."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    for group in GROUPS:
        number = sum(group.skip_reason in reason for reason in reasons) if group.missing else 0
        if number:
            terminalreporter.write_line(
                f"Left out: tests that {group.what} ({number}). They need {' and '.join(group.programs)}, "
                f"as from: {group.source}"
            )
