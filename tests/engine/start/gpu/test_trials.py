"""A trial that ends the process, or loses the GPU, is left out of the next start. No GPU and no kernel takes part."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oaiserve.engine.start.gpu.trial_marker import TrialMarker
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.errors import DeviceLost, StartupError

START = """
import os, signal, sys
from pathlib import Path
from oaiserve.engine.start.gpu.trial_marker import TrialMarker
from oaiserve.engine.start.gpu.trials import Trials

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
trials = Trials(TrialMarker(Path(sys.argv[1])))
trials.is_usable("attention", lambda: None)
trials.is_usable("sampling", lambda: os.kill(os.getpid(), int(sys.argv[2])))
print([name for name, reason in trials.off.items() if not reason], trials.off["sampling"])
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trials" / "model"


def start(path: Path, number: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", START, str(path), str(number)], capture_output=True, text=True)


def broken() -> None:
    raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_trial_that_ends_the_process_is_off_at_the_next_start(path: Path, number: int) -> None:
    assert start(path, number).returncode == -number
    for _ in range(2):  # it is not tried again by a later one
        second = start(path, number)
        assert second.returncode == 0, second.stderr
        assert "['attention']" in second.stdout
        assert "ended in it (--recheck tries it again)" in second.stdout
    TrialMarker(path, forget=True)
    assert start(path, number).returncode == -number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_a_start_in_a_trial_leaves_no_mark(path: Path, number: int) -> None:
    assert start(path, number).returncode == -number
    assert not path.exists()
    assert start(path, 0).returncode == 0


def test_a_trial_that_loses_the_gpu_ends_the_start_and_is_off_at_the_next(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trials = Trials(TrialMarker(path), synchronize=broken)
    assert trials.is_usable("sampling", lambda: None)
    with pytest.raises(DeviceLost, match="CUDA graphs of decodes: .*illegal memory access"):
        trials.is_usable("decode_graphs", broken)
    again = Trials(TrialMarker(path), synchronize=lambda: None)
    with caplog.at_level(logging.WARNING):
        assert not again.is_usable("decode_graphs", lambda: pytest.fail("it is tried again"))
    assert [message.partition(":")[0] for message in caplog.messages] == ["CUDA graphs of decodes"]
    assert again.is_usable("prompt_graphs", lambda: None)


def test_other_work_that_loses_the_gpu_switches_off_what_it_is_blamed_on(path: Path) -> None:
    trials = Trials(TrialMarker(path), synchronize=broken)
    assert trials.is_usable("attention", lambda: None)
    with pytest.raises(DeviceLost), trials.blamed_on("attention"):
        broken()
    again = Trials(TrialMarker(path))
    assert not again.is_usable("attention", lambda: pytest.fail("it is tried again"))
    with pytest.raises(RuntimeError, match="illegal memory access"), again.blamed_on("attention"):
        broken()  # it is off, so something else is wrong


def test_a_trial_that_fails_on_a_sound_gpu_is_tried_at_the_next_start(path: Path) -> None:
    assert not Trials(TrialMarker(path)).is_usable("adapters", broken)
    assert not path.exists()


def test_where_nothing_can_be_remembered_a_lost_gpu_ends_the_start_for_good(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir(mode=0o777)
    path.parent.chmod(0o777)
    trials = Trials(TrialMarker(path), synchronize=broken)
    assert "other users can write" in caplog.text
    with pytest.raises(StartupError) as raised:
        trials.is_usable("attention", broken)
    assert not isinstance(raised.value, DeviceLost)


SERVER = """
import sys
from pathlib import Path
from oaiserve import cli
from oaiserve.engine.engine import Engine
from oaiserve.errors import DeviceLost

lost, model = Path(sys.argv[1]), sys.argv[2]

def load(*_, **__):
    if lost.exists():
        raise SystemExit("the second start")
    lost.touch()
    raise DeviceLost("The GPU failed.")

Engine.from_pretrained = load
sys.exit(cli.main(["serve", model, "--port", "0"]))
"""


def test_a_server_whose_gpu_is_lost_starts_again_in_the_same_process(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "lost"), str(tmp_path / "model")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OAISERVE_CACHE": str(tmp_path)},
    )
    _, text = process.communicate(timeout=120)
    assert process.returncode == 1, text
    assert text.count("The server starts again without it") == 1
    assert text.endswith("the second start\n")


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "7", '{"trying": []}', '{"died": 1}', "\xff", None])
def test_a_spoiled_mark_counts_as_missing(path: Path, content: str | None) -> None:
    path.parent.mkdir(exist_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_text(content, encoding="latin-1")
        path.chmod(0o600)
    assert Trials(TrialMarker(path)).is_usable("sampling", lambda: None)
