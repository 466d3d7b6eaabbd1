"""Probes in child processes that hang, crash or compute something else switch features off, and never the server."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from oaiserve.config import EngineOptions
from oaiserve.engine.start.gpu.child import DECLINED, Order, probed
from oaiserve.engine.start.gpu.features import Verdict, all_off

# A probe. Its arguments are what happens, and whether that happens without graphs, too.
PROBE = """
import os, pickle, signal, sys, threading

order = pickle.load(sys.stdin.buffer)
what, always = sys.argv[1:]
with open(os.environ["PROBES"], "a") as file:
    print(order.options.cuda_graph, file=file)
print("this is no log")
if not (order.options.cuda_graph or always == "always"):
    sys.exit()
if what == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()
elif what == "crashes":
    os.kill(os.getpid(), signal.SIGSEGV)
elif what == "is wrong":
    print("a line of the log\\nthe outputs would differ by 50 %", file=sys.stderr)
    sys.exit(1)
elif what == "is declined":
    sys.exit(DECLINED)
""".replace("DECLINED", str(DECLINED))
ORDER = Order("a model", EngineOptions(), "cuda")
REASONS = {
    "hangs": "its probe took longer than 2 s",
    "crashes": "its probe ended with SIGSEGV",
    "is wrong": "its probe ended with exit code 1: the outputs would differ by 50 %",
}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "probes"
    monkeypatch.setenv("PROBES", str(path))
    return path


def run(what: str, when: str = "with graphs", order: Order = ORDER) -> Verdict | None:
    return probed(order, (sys.executable, "-c", PROBE, what, when), 2.0 if what == "hangs" else 60.0)


def test_features_that_a_probe_can_use_are_on(log: Path) -> None:
    assert run("works") == {"kernels": "", "graphs": ""}
    assert log.read_text() == "True\n"


@pytest.mark.parametrize("what", REASONS)
def test_graphs_are_off_if_a_probe_works_only_without_them(what: str, log: Path) -> None:
    assert run(what) == {"kernels": "", "graphs": REASONS[what]}
    assert log.read_text() == "True\nFalse\n"


@pytest.mark.parametrize("what", REASONS)
def test_all_is_off_if_no_probe_works(what: str, log: Path) -> None:
    assert run(what, "always") == all_off(REASONS[what])
    log.unlink()
    without_graphs = ORDER._replace(options=EngineOptions(cuda_graph=False))
    assert run(what, "always", without_graphs) == all_off(REASONS[what])
    assert log.read_text() == "False\n"


def test_a_model_that_cannot_be_started_has_no_verdict(log: Path) -> None:
    assert run("is declined") is None


def test_no_process_is_left(log: Path) -> None:
    run("hangs")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            is_ours = f"PROBES={log}".encode() in (folder / "environ").read_bytes()
        except OSError:  # it is gone, or not ours
            continue
        assert not (is_ours and b"this is no log" in words and folder.name != str(os.getpid())), words


def test_the_probe_itself_reads_its_order_and_declines_a_model_that_is_not_there(tmp_path: Path) -> None:
    assert probed(Order(str(tmp_path), EngineOptions(), "cpu")) is None


def test_an_error_of_the_probe_itself_is_the_reason(tmp_path: Path) -> None:
    no_folder: Any = 7
    verdict = probed(Order(no_folder, EngineOptions(cuda_graph=False), "cpu"))
    assert verdict is not None
    assert verdict["kernels"].startswith("its probe ended with exit code 1: ")
    assert "Error: " in verdict["kernels"]
