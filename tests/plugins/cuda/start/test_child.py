"""Probes in child processes that hang, crash or compute something else switch features off, and never the server."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict

from oaiserve.config import EngineOptions
from oaiserve.plugins.cuda.executor.product_ways import UNMEASURED, ProductWays
from oaiserve.plugins.cuda.start.child import DECLINED, FOUND, Order, probed
from oaiserve.plugins.cuda.start.features import BY_TORCH, FEATURES, Probed, Verdict, all_off
from tests.waiting import wait_until

WAYS = ProductWays(unpacked_from=256)
# A probe. Its arguments are what happens, and with which features.
PROBE = (
    """
import json, os, pickle, signal, sys, threading

order = pickle.load(sys.stdin.buffer)
what, when = sys.argv[1:]
graphs = order.verdict["graphs"]
by_torch = order.verdict["fp8_products"]
tries_torch = not by_torch
if when == "with graphs":
    by_torch = by_torch or "slower"
on = ["with graphs"] * (not graphs) + ["with torch"] * (not by_torch) + ["always", "before its verdict"]
with open(os.environ["PROBES"], "a") as file:
    print(*on[:-2], file=file)
print("this is no log")
is_right = what == "works" or when not in on
if when != "before its verdict" or not tries_torch:
    features = {"kernels": "", "graphs": graphs, **dict.fromkeys(BY_TORCH, by_torch)}
    print("found: " + json.dumps({"verdict": features, "ways": WAYS, "seconds": {}, "about": ""}), file=sys.stderr)
    if is_right or when == "before its verdict":
        sys.exit()
if what == "hangs":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(os.environ["HANGS"], "w").close()
    threading.Event().wait()
elif what == "crashes":
    os.kill(os.getpid(), signal.SIGSEGV)
elif what == "is wrong":
    print("a line of the log\\nthe outputs would differ by 50 %", file=sys.stderr)
    sys.exit(1)
elif what == "is declined":
    sys.exit(DECLINED)
""".replace("DECLINED", str(DECLINED))
    .replace("BY_TORCH", str(BY_TORCH))
    .replace("WAYS", str(asdict(WAYS)))
)
ALL_ON = dict.fromkeys(FEATURES, "")
ORDER = Order("a model", EngineOptions(), "cuda", ALL_ON)
LIMIT_SECONDS = 60.0
REASONS = {
    "hangs": "its probe took longer than 60 s",
    "crashes": "its probe ended with SIGSEGV",
    "is wrong": "its probe ended with exit code 1: the outputs would differ by 50 %",
}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "probes"
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("PROBES", str(path))
    monkeypatch.setenv("HANGS", str(hangs))

    class Process(subprocess.Popen[bytes]):
        """A process whose time limit passes as soon as it hangs, and no sooner, however slow the machine is."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == LIMIT_SECONDS:
                wait_until(lambda: self.poll() is not None or hangs.exists())
                if hangs.exists():
                    hangs.unlink()
                    raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    return path


def run(
    what: str, when: str = "with graphs", order: Order = ORDER, limit_seconds: float = LIMIT_SECONDS
) -> Verdict | None:
    found = probed(order, (sys.executable, "-c", PROBE, what, when), limit_seconds)
    if found is None:
        return None
    assert found.ways == (UNMEASURED if found.verdict["kernels"] else WAYS)
    return found.verdict


def verdict(by_torch: str, graphs: str = "") -> Verdict:
    return {"kernels": "", "graphs": graphs, **dict.fromkeys(BY_TORCH, by_torch)}


def test_features_that_a_probe_can_use_are_on(log: Path) -> None:
    assert run("works", "with torch") == verdict("")
    assert run("works") == verdict("slower")
    assert log.read_text() == "with graphs with torch\nwith graphs\n"


@pytest.mark.parametrize("what", REASONS)
@pytest.mark.parametrize("when", ["with torch", "before its verdict"])
def test_what_torch_computes_is_off_if_a_probe_works_only_without_it(what: str, when: str, log: Path) -> None:
    assert run(what, when) == verdict(REASONS[what])
    assert log.read_text() == "with graphs with torch\nwith graphs\n"


@pytest.mark.parametrize("what", REASONS)
def test_graphs_are_off_if_a_probe_works_only_without_them(what: str, log: Path) -> None:
    assert run(what) == verdict("slower", REASONS[what])
    assert log.read_text() == "with graphs\n\n"


@pytest.mark.parametrize("what", REASONS)
def test_all_is_off_if_no_probe_works(what: str, log: Path) -> None:
    assert run(what, "always") == all_off(REASONS[what])
    log.unlink()
    without_graphs = ORDER._replace(verdict={**ALL_ON, "graphs": "--no-cuda-graph"})
    assert run(what, "always", without_graphs) == all_off(REASONS[what])
    assert log.read_text() == "with torch\n\n"


@pytest.mark.usefixtures("log")
def test_a_probe_that_takes_longer_than_its_limit_has_failed() -> None:
    assert run("hangs", "always", limit_seconds=0.1) == all_off("its probe took longer than 0 s")


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
    assert probed(Order(str(tmp_path), EngineOptions(), "cpu", ALL_ON)) is None


def test_an_error_of_the_probe_itself_is_the_reason(tmp_path: Path) -> None:
    no_folder: Any = 7
    found = probed(Order(no_folder, EngineOptions(), "cpu", all_off("it was not tried")))
    assert found is not None
    assert found.verdict["kernels"].startswith("its probe ended with exit code 1: ")
    assert "Error: " in found.verdict["kernels"]


def test_a_probe_that_uses_what_its_order_has_off_is_not_repeated_without_end() -> None:
    found = msgspec.json.encode(Probed(ALL_ON)).decode()
    script = f"import sys; sys.stdin.buffer.read(); print({FOUND + found!r}, file=sys.stderr); sys.exit('wrong')"
    ended = probed(ORDER, (sys.executable, "-c", script), LIMIT_SECONDS)
    assert ended is not None
    assert ended.verdict == all_off("its probe ended with exit code 1: wrong")
