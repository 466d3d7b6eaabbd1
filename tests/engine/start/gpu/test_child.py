"""Probes in child processes that hang, crash or compute something else cost one feature, and never the server."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from oaiserve.config import EngineOptions
from oaiserve.engine.start.gpu.child import Order, probed
from oaiserve.engine.start.gpu.trials import FEATURES, Verdict

# A probe that tries all features. What happens in the trial of one is in its argument.
PROBE = """
import json, os, pickle, signal, sys, threading, time

order, verdict = pickle.load(sys.stdin.buffer)
what, feature = sys.argv[1:]
with open(os.environ["PROBES"], "a") as file:
    print(len(verdict), file=file)

def say(*message):
    print(json.dumps(message), flush=True)

def act():
    if what == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()
    elif what == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "raises":
        raise RuntimeError("an illegal memory access was encountered")
    elif what == "fails":
        sys.exit("RuntimeError: Failed to find C compiler")
    elif what == "is declined":
        say("verdict", None)
        sys.exit()

if feature == "none":
    act()
for name in FEATURES:
    if name in verdict:
        continue
    say("trying", name)
    if what == "all sleep":
        time.sleep(1)
    if name == feature:
        if what == "is wrong":
            verdict[name] = "the outputs would differ by 50 %"
            continue
        act()
    verdict[name] = ""
    say("trying", None)
say("verdict", verdict)
if what == "fails at its end":
    sys.exit(99)
""".replace("FEATURES", repr(list(FEATURES)))


ORDER = Order("a model", EngineOptions(), "cuda")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "probes"
    monkeypatch.setenv("PROBES", str(path))
    return path


def run(what: str, feature: str, limit_seconds: float = 60.0) -> Verdict | None:
    return probed(ORDER, (sys.executable, "-c", PROBE, what, feature), limit_seconds)


@pytest.mark.parametrize(
    ("what", "reason", "probes"),
    [
        ("hangs", "its trial took longer than 2 s", 2),
        ("crashes", "its trial ended a process with SIGSEGV", 2),
        ("raises", "exit code 1: RuntimeError: an illegal memory access was encountered", 2),
        ("fails", "RuntimeError: Failed to find C compiler", 2),
        ("is wrong", "the outputs would differ by 50 %", 1),
    ],
)
def test_a_feature_that_fails_in_a_probe_is_off_and_the_others_are_on(
    what: str, reason: str, probes: int, log: Path
) -> None:
    verdict = run(what, "graphs", 2.0 if what == "hangs" else 60.0)
    assert verdict is not None
    assert reason in verdict["graphs"]
    assert {name for name, why in verdict.items() if not why} == set(FEATURES) - {"graphs"}
    assert len(log.read_text().splitlines()) == probes


@pytest.mark.parametrize("what", ["hangs", "crashes", "raises"])
def test_a_probe_that_fails_in_no_trial_leaves_all_features_off(what: str, log: Path) -> None:
    verdict = run(what, "none", 2.0 if what == "hangs" else 60.0)
    assert verdict is not None
    assert verdict.keys() == set(FEATURES)
    assert all(verdict.values())
    assert log.read_text() == "0\n"


def test_how_a_probe_ends_after_its_verdict_does_not_matter(log: Path) -> None:
    verdict = run("fails at its end", "none")
    assert verdict == dict.fromkeys(FEATURES, "")


def test_a_probe_that_goes_on_may_take_longer_than_one_of_its_trials(log: Path) -> None:
    assert run("all sleep", "none", 1.5) == dict.fromkeys(FEATURES, "")


def test_a_model_that_cannot_be_started_has_no_verdict(log: Path) -> None:
    assert run("is declined", "none") is None


def test_a_probe_that_cannot_run_leaves_all_features_off() -> None:
    verdict = probed(ORDER, (sys.executable, "-c", "raise SystemExit('no torch')"))
    assert verdict is not None
    assert {name for name, why in verdict.items() if "no torch" in why} == set(FEATURES)


def test_no_process_is_left(log: Path) -> None:
    run("hangs", "kernels", 1.0)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            is_ours = f"PROBES={log}".encode() in (folder / "environ").read_bytes()
        except OSError:  # it is gone, or not ours
            continue
        assert not (is_ours and b"order, verdict" in words and folder.name != str(os.getpid())), words


def test_the_probe_itself_reads_its_order_and_declines_a_model_that_is_not_there(tmp_path: Path) -> None:
    assert probed(Order(str(tmp_path), EngineOptions(), "cpu")) is None


def test_an_error_of_the_probe_itself_is_the_reason(tmp_path: Path) -> None:
    no_options: Any = None
    verdict = probed(Order(str(tmp_path), no_options, "cpu"))
    assert verdict is not None
    assert verdict["kernels"].startswith("its trial ended a process with exit code 1: TypeError: replace()")
