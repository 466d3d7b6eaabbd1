"""The fuzzer: its inputs repeat, its readers take the sound ones, and a fault is found and kept."""

import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tools.attack import fuzz, schema, targets
from tools.server_process import ROOT

# Starts of whole models are left to `make fuzz`, since each sets the folder of the cache for its process.
READERS = [name for name in fuzz.TARGETS if not name.startswith("start-")]

# Two targets of which one refuses nothing, and a reader that never ends
FAULTY = """
import dataclasses, sys
from hypothesis import strategies as st
from tools.attack import fuzz, targets

def hang(content):
    while True:
        pass

fuzz.CPU_SECONDS = 0.2
fuzz.TARGETS["codings"] = dataclasses.replace(fuzz.TARGETS["codings"], refusals=())
fuzz.TARGETS["hangs"] = targets.Target(lambda folder: hang, (), others=st.just(b"x"))
only = ("--only", "codings", "--only", "safetensors", "--only", "hangs")
sys.exit(fuzz.main([*only, "--seconds", "0.1", "--into", sys.argv[1]]))
"""

# On a slow machine: an hour passes between two looks at the clock.
SLOW = """
import dataclasses, itertools, sys, time
from tools.attack import fuzz

time.monotonic = itertools.count(0, 3600).__next__
fuzz.TARGETS["codings"] = dataclasses.replace(fuzz.TARGETS["codings"], fixed=30)
fuzz.NUM_DRAWN = 5
folder, *options = sys.argv[1:]
for option in options:
    assert fuzz.main(["--only", "codings", option, "--into", folder]) == 0
    print("end", flush=True)
"""
# With three sound inputs, and one that has been kept.
NUMBER_OF_INPUTS = {"--fixed": 34, "--seconds=5": 9}


@pytest.mark.parametrize("name", READERS)
def test_inputs_are_a_function_of_the_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", count(10**9, 3600).__next__)  # Some formats have the time of writing.
    number = 20 if name == "bodies" else 50
    first, again, other = (schema.drawn(fuzz.TARGETS[name].inputs, seed, number) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("name", [name for name in READERS if fuzz.TARGETS[name].sound is not targets.no_seeds])
def test_sound_inputs_are_read(name: str, tmp_path: Path) -> None:
    target = fuzz.TARGETS[name]
    read = target.read(tmp_path)
    for content in target.sound():
        read(content)


def test_an_input_with_a_fault_is_made_small() -> None:
    given: list[bytes] = []

    def read(content: bytes) -> None:
        given.append(content)
        assert b"q" not in content

    with pytest.raises(AssertionError):
        schema.for_each(read, st.binary(max_size=50), from_seed=1, number=2000)
    assert given[-1] == b"q"


@pytest.mark.parametrize(
    ("said", "is_one"),
    [
        ("a line\noaiserve: '/m' cannot be used: it is cut.\n", True),
        ("", False),
        ("Traceback\noaiserve: '/m' cannot be used: it is cut.", False),
        ("oaiserve: No model could be loaded from 'm': MemoryError", False),
        (f"oaiserve: {'x' * 1000}", False),
    ],
)
def test_a_refused_start_ends_in_a_sentence(said: str, is_one: bool) -> None:
    assert targets.is_a_sentence(said) == is_one


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
