"""A change consists of the files that differ from main's, committed or not, and of new ones."""

import subprocess
from pathlib import Path

import pytest

from tools.changes import changed_files


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose branch left main after one commit."""
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    for name in ("kept.py", "edited.py", "committed.py", "deleted.py", "of_main.py"):
        (tmp_path / name).write_text("a = 1\n")
    (tmp_path / ".gitignore").write_text("ignored\n")
    commit(tmp_path)
    git(tmp_path, "checkout", "--quiet", "-b", "branch")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Change files")


def test_committed_edited_deleted_and_new_files_are_changed(repository: Path) -> None:
    (repository / "committed.py").write_text("a = 2\n")
    commit(repository)
    (repository / "edited.py").write_text("a = 2\n")
    (repository / "deleted.py").unlink()
    (repository / "new.py").touch()
    (repository / "ignored").touch()

    assert changed_files(repository) == {"committed.py", "edited.py", "deleted.py", "new.py"}


def test_later_commits_of_main_are_no_change_of_the_branch(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "main")
    (repository / "of_main.py").write_text("a = 2\n")
    commit(repository)
    git(repository, "checkout", "--quiet", "branch")

    assert changed_files(repository) == set()


def test_a_folder_without_a_repository_has_no_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "a.py").touch()

    assert changed_files(tmp_path) == set()


def test_without_git_there_are_no_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    assert changed_files(tmp_path) == set()
