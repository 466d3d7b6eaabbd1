"""The tool that starts on broken files: what it spoils repeats, it sees what is wrong, and starts end in sentences."""

import json
import random
import re
import signal
import subprocess
import sys

import pytest

from tools.attack.broken_files import bare_error, outcome
from tools.attack.spoils import edited, edited_json, spoiled
from tools.server_process import ROOT

SENTENCE = "oaiserve: '/m' cannot be used: it is cut."


@pytest.mark.parametrize(
    ("status", "said", "peak_mib", "judged"),
    [
        (0, "", 100, "served"),
        (2 << 8, SENTENCE, 100, "checked"),
        (2 << 8, "oaiserve: 'm' cannot be served: it is an encoder-decoder model.", 100, "refused"),
        (2 << 8, "", 100, "no sentence"),
        (2 << 8, f"Traceback\n{SENTENCE}", 100, "no sentence"),
        (2 << 8, "oaiserve: No model could be loaded from 'm': MemoryError", 100, "out of memory"),
        (1 << 8, "Traceback", 100, "exit code 1"),
        (signal.SIGSEGV, "", 100, "ended by SIGSEGV"),
        (signal.SIGXCPU, "", 100, "ended by SIGXCPU"),
        (0, "", 5000, "took 5000 MiB"),
    ],
)
def test_an_end_is_judged(status: int, said: str, peak_mib: float, judged: str) -> None:
    assert outcome(said, status, peak_mib, most_mib=1000) == judged


def test_a_refusal_that_names_no_setting_is_seen() -> None:
    assert bare_error("a line\noaiserve: The weights of 'm' could not be loaded: TypeError: no") == "a bare TypeError"
    assert bare_error(SENTENCE) is None
    assert bare_error("") is None


def test_what_is_edited_repeats_and_is_always_another_file() -> None:
    tree = {"a": 1, "b": [1, 2, {"c": "x"}], "d": {}}
    first, again = ([edited(tree, random.Random(seed)) for seed in range(200)] for _ in range(2))
    assert json.dumps(first) == json.dumps(again)
    assert tree == {"a": 1, "b": [1, 2, {"c": "x"}], "d": {}}
    content = json.dumps(tree).encode()
    assert all(spoiled(edited_json, content, random.Random(seed)) != content for seed in range(200))


@pytest.mark.compiler
def test_a_broken_file_of_each_format_ends_in_a_sentence_or_serve() -> None:
    command = [sys.executable, "-m", "tools.attack.broken_files", "--seed", "7", "--number", "1", "--at-once", "2"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"^20 starts of seed 7 in \d+ s, 0 wrong$", process.stdout, re.MULTILINE)
