"""Cases of the GPU check that run side by side: one that crashes, hangs or raises loses its own result alone."""

import re
import sys
from types import SimpleNamespace

import pytest

from tools.gpu import workload
from tools.gpu.sections import Target
from tools.gpu.side_by_side import checked
from tools.gpu.worker import answer

CPU = Target(SimpleNamespace(type="cpu"), quick=True)  # Each process would import torch for a device of torch.
# A worker that answers with its process, and in which some cases go wrong.
WORKER = """
import os, signal, sys, threading
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
check, target = connection.recv()
assert (check, target.quick) == ("module:check", True)
connection.send("ready")
while True:
    case = connection.recv()
    if "crashes" in case:
        print("illegal address", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if "hangs" in case:
        threading.Event().wait()
    is_alive = "lost" not in case
    connection.send({"equal": True, "process": os.getpid(), "off": {"kernels": case} if "off" in case else {},
                     "is_alive": is_alive})
"""


def found_of(cases: list[str], at_once: int = 1, limit_seconds: float = 60.0) -> dict[str, dict[str, object]]:
    command = (sys.executable, "-c", WORKER)
    parts = checked(cases, "module:check", CPU, at_once=at_once, limit_seconds=limit_seconds, command=command)
    return {name: result for part in parts for name, result in part.items()}


def test_a_process_checks_one_case_after_the_other() -> None:
    found = found_of(["a", "b", "c"])
    assert [*found] == ["a", "b", "c"]
    assert len({result["process"] for result in found.values()}) == 1
    assert all(result["equal"] for result in found.values())


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_case_that_crashes_loses_its_own_result_alone(at_once: int) -> None:
    found = found_of(["a", "crashes", "b", "crashes too", "c"], at_once)
    assert {name for name, result in found.items() if result["equal"]} == {"a", "b", "c"}
    assert found["crashes"]["problem"] == "its process ended with SIGSEGV"
    assert found["crashes too"]["log"] == ["illegal address"]


def test_a_case_that_hangs_is_ended() -> None:
    found = found_of(["hangs", "a"], limit_seconds=3.0)
    assert re.fullmatch(r"it took longer than ([3-9]|\d{2,}) s", str(found["hangs"]["problem"]))
    assert found["a"]["equal"]


def test_a_process_that_has_lost_its_device_is_not_used_again() -> None:
    found = found_of(["lost", "a"])
    assert found["lost"]["process"] != found["a"]["process"]


def test_processes_that_do_not_start_are_reported() -> None:
    parts = checked(["a", "b"], "m:f", CPU, at_once=2, limit_seconds=9, command=(sys.executable, "-c", "exit(3)"))
    problems = [result["problem"] for part in parts for result in part.values()]
    assert problems == ["its process ended with exit code 3"] * 2


def test_features_that_are_off_in_a_process_are_off_in_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "OFF", {})
    monkeypatch.setattr("tools.gpu.side_by_side.OFF", off := {})
    found = found_of(["off"])
    assert off == {"kernels": "off"}
    assert "off" not in found["off"]


def test_a_check_that_raises_is_not_equal() -> None:
    found = answer("tools.gpu.probes:check", CPU, "no such case")
    assert not found["equal"]
    assert found["problem"] == "KeyError: 'no such case'"
