"""The fuzzer: its inputs repeat, its readers take the sound ones, and a fault is found and kept."""

import random
import subprocess
import sys
import time
from itertools import count, islice
from pathlib import Path

import pytest

from tools.attack import fuzz
from tools.server_process import ROOT

# Two targets of which one refuses nothing, and a reader that never ends
FAULTY = """
import dataclasses, itertools, sys
from tools.attack import fuzz

def hang(content):
    while True:
        pass

fuzz.CPU_SECONDS = 0.2
fuzz.TARGETS["codings"] = dataclasses.replace(fuzz.TARGETS["codings"], refusals=())
fuzz.TARGETS["hangs"] = fuzz.Target(lambda folder: hang, (), lambda rng: itertools.repeat(b"x"))
only = ("--only", "codings", "--only", "safetensors", "--only", "hangs")
sys.exit(fuzz.main([*only, "--seconds", "0.1", "--into", sys.argv[1]]))
"""

# On a slow machine: an hour passes between two looks at the clock.
SLOW = """
import dataclasses, itertools, sys, time
from tools.attack import fuzz

time.monotonic = itertools.count(0, 3600).__next__
fuzz.TARGETS["codings"] = dataclasses.replace(fuzz.TARGETS["codings"], num_fixed=30)
folder, *options = sys.argv[1:]
for option in options:
    assert fuzz.main(["--only", "codings", option, "--into", folder]) == 0
    print("end", flush=True)
"""
NUMBER_OF_INPUTS = {"--fixed": 30, "--seconds=5": 1}


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_inputs_are_a_function_of_the_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", count(10**9, 3600).__next__)  # Some formats have the time of writing.
    inputs = fuzz.TARGETS[name].inputs
    number = 60 if name == "bodies" else 300  # beyond the sound ones
    first, again, other = ([*islice(inputs(random.Random(seed)), number)] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("name", sorted(fuzz.TARGETS.keys() - {"bodies"}))
def test_sound_inputs_are_read(name: str, tmp_path: Path) -> None:
    target = fuzz.TARGETS[name]
    read = target.read(tmp_path)
    read(next(target.inputs(random.Random(1))))


@pytest.fixture(scope="module")
def said_on_a_slow_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the output of a run with each option. They share a process, whose imports take longer."""
    command = [sys.executable, "-c", SLOW, str(tmp_path_factory.mktemp("fuzz")), *NUMBER_OF_INPUTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return dict(zip(NUMBER_OF_INPUTS, done.stdout.split("end\n"), strict=False))


@pytest.mark.parametrize(("option", "number"), NUMBER_OF_INPUTS.items())
def test_a_fixed_number_of_inputs_does_not_depend_on_time(
    option: str, number: int, said_on_a_slow_machine: dict[str, str]
) -> None:
    assert f"codings: {number} inputs" in said_on_a_slow_machine[option]


def test_inputs_with_a_fault_or_without_an_end_stay(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FAULTY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (1, "")
    assert "2 of 3 targets of seed 1 have a fault" in done.stdout
    assert f"codings: raised an error on {tmp_path / 'codings' / '1'}" in done.stdout
    assert f"hangs: ended by SIGVTALRM on {tmp_path / 'hangs' / '1'}" in done.stdout
    assert (tmp_path / "hangs" / "1").read_bytes() == b"x"
    assert not (tmp_path / "safetensors" / "1").exists()
