"""The temporary folder of a server of several models: it goes with its server, or with the next one."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from oaiserve.plugins.gateway.several import folder
from oaiserve.plugins.gateway.several.folder import PREFIX, ModelsFolder

KILLED = """
import os
from oaiserve.plugins.gateway.several.folder import ModelsFolder
own = ModelsFolder()
(own.path / "responses").write_text("Hi")
os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def leave_one(temporary: Path) -> Path:
    """Return the folder of a server that was killed."""
    before = {*temporary.iterdir()}
    assert subprocess.run([sys.executable, "-c", KILLED], env=os.environ | {"TMPDIR": str(temporary)}).returncode == -9
    (left,) = {*temporary.iterdir()} - before
    return left


def test_folder_is_private_and_goes_with_its_server(temporary: Path) -> None:
    own = ModelsFolder()
    assert own.path.stat().st_mode & 0o777 == 0o700
    own.remove()
    assert [*temporary.iterdir()] == []


def test_next_server_removes_the_folder_of_a_killed_one_and_no_other(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "LEAST_AGE_SECONDS", 0.0)
    (temporary / "other").mkdir()
    (temporary / "other" / "file").touch()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "other")
    running = ModelsFolder()
    left = leave_one(temporary)
    assert (left / "responses").exists()
    new = ModelsFolder()
    assert {*temporary.iterdir()} == {running.path, new.path, temporary / "other", temporary / f"{PREFIX}link"}
    assert (temporary / "other" / "file").exists()
    running.remove()
    new.remove()


def test_folder_that_may_not_be_locked_yet_stays(temporary: Path) -> None:
    left = leave_one(temporary)
    new = ModelsFolder()
    assert left.exists()
    new.remove()
