"""Models on this disk are listed, removed and fetched."""

import errno
import json
import os
import re
import shutil
import sys
from io import StringIO
from pathlib import Path

import pytest
from gguf.constants import LlamaFileType

from oaiserve import cli
from oaiserve.checkpoints import demo
from oaiserve.commands.models import GGUF_FORMS
from oaiserve.storage import private, start_cache
from tests.checkpoints.test_checkpoint import gguf, safetensors
from tests.checkpoints.test_hub import GGUFS, MODEL, REPOSITORY, put

HubFolder = tuple[Path, list[str]]


def put_model(folder: Path, name: str = "config.json", **config: object) -> Path:
    private.make_folder(folder)
    (folder / name).write_text(json.dumps({"model_type": "qwen3", **config}))
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert cli.main(argv) == code
    out, err = capsys.readouterr()
    return err if code == 2 else out


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Return the words of each line after the name."""
    return {name: rest for name, *rest in (line.split() for line in run(capsys, "list").splitlines()[1:])}


def remembered(folder: Path) -> Path:
    subject = start_cache.subject("model", folder, (".json", ".safetensors"), options={}, packages=("pytest",))
    path = start_cache.remember(subject, dict, b"")
    assert path is not None
    return path


def test_where_there_is_no_model_the_list_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "oaiserve pull demo" in run(capsys, "list")


def test_the_demo_and_models_that_were_served_are_listed(
    capsys: pytest.CaptureFixture[str], cache: Path, tmp_path: Path
) -> None:
    put_model(cache / "models" / demo.NAME, model_type="llama")
    (cache / "models" / demo.NAME / demo.DIGESTS).touch()
    own = put_model(tmp_path / "own", quantization_config={"quant_method": "awq"})
    remembered(own)
    models = listed(capsys)
    assert models["demo"][2:] == ["safetensors", "f32", "llama", "no"]
    assert models[str(own)][2:-1] == ["safetensors", "awq", "qwen3"]
    assert models[str(own)][-1].startswith("20")
    (own / "config.json").write_text("{}")  # another model than the one that was checked
    assert listed(capsys)[str(own)][-2:] == ["-", "no"]


def test_only_what_is_remembered_of_the_users_own_model_is_removed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = put_model(tmp_path / "own")
    record = remembered(own)
    assert "Give --yes" in run(capsys, "rm", str(own), code=2)
    assert "are free again" in run(capsys, "rm", str(own), "--yes")
    assert not record.exists()
    assert (own / "model.safetensors").exists()


@pytest.mark.parametrize("typed", ["n\n", "\n", ""])
def test_a_model_stays_unless_the_user_says_yes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    """Ctrl-D ends the input."""
    record = remembered(put_model(tmp_path / "own"))
    terminal = StringIO(typed)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "[y/N]" in run(capsys, "rm", str(tmp_path / "own"), code=1)
    assert record.exists()


def test_a_record_that_a_start_removes_meanwhile_is_removed(
    capsys: pytest.CaptureFixture[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start forgets models whose files are gone, such as those that are just being removed."""
    folder = put_model(cache / "models" / demo.NAME)
    (folder / demo.DIGESTS).touch()
    record = remembered(folder)
    rmtree = shutil.rmtree

    def remove_both(folder: Path) -> None:
        rmtree(folder)
        record.unlink()

    monkeypatch.setattr(shutil, "rmtree", remove_both)
    assert "are free again" in run(capsys, "rm", "demo", "--yes")
    assert not folder.exists()


def test_a_model_of_the_hub_is_fetched_listed_and_removed(
    hub: HubFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    put(hub[0], MODEL)
    put_model(hub[0])
    assert f"{REPOSITORY} is on this disk: " in run(capsys, "pull", REPOSITORY)
    assert listed(capsys)[REPOSITORY][2:] == ["safetensors", "f32", "qwen3", "no"]
    assert "Did you mean someone/model?" in run(capsys, "rm", "some/model", "--yes", code=2)
    assert "are free again" in run(capsys, "rm", REPOSITORY, "--yes")
    assert listed(capsys) == {}
    assert not any((tmp_path / "cache").rglob("blobs/*"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_files_that_cannot_be_removed_are_named(
    number: int, hub: HubFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub[0], MODEL)
    run(capsys, "pull", REPOSITORY)

    def rmtree(folder: Path) -> None:
        raise OSError(number, os.strerror(number), str(folder))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    refusal = run(capsys, "rm", REPOSITORY, "--yes", code=2)
    says = (
        rf"oaiserve rm: Not all files of '{REPOSITORY}' could be removed: {os.strerror(number)} \(/.*/models--.*\)\.\n"
    )
    assert re.fullmatch(says, refusal)


def test_of_gguf_files_in_one_repository_each_is_a_model(
    hub: HubFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    put(hub[0], GGUFS)
    (hub[0] / GGUFS[0]).write_bytes(gguf(file_type=15))
    for name in ("Q4_K_M", "Q8_0"):
        run(capsys, "pull", f"{REPOSITORY}:{name}")
    models = listed(capsys)
    assert models[f"{REPOSITORY}:Q4_K_M"][2:] == ["GGUF", "Q4_K_M", "llama", "no"]
    assert models[f"{REPOSITORY}:Q8_0"][2:] == ["damaged", "-", "no"]
    run(capsys, "rm", f"{REPOSITORY}:Q8_0", "--yes")
    assert list(listed(capsys)) == [f"{REPOSITORY}:Q4_K_M"]
    run(capsys, "rm", f"{REPOSITORY}:Q4_K_M", "--yes")
    assert not any((tmp_path / "cache").rglob("*.gguf"))


def test_forms_of_gguf_files_have_the_names_of_the_package_gguf() -> None:
    names = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in LlamaFileType}
    assert names == GGUF_FORMS
