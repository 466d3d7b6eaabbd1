"""Tests files of keys: what may stand in them, and that a changed file is read again."""

import logging
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oaiserve.errors import StartupError
from oaiserve.http.keys import MOST_BYTES, Keyring, exposure


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def write(file: Path, text: str | bytes | None) -> None:
    """Replace the file, as a mounted secret is replaced, or remove it."""
    if text is None:
        file.unlink(missing_ok=True)
        return
    new = file.with_name("new")
    new.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.replace(new, file)


def settle(keys: Keyring) -> None:
    keys.refresh()
    keys.refresh()


def names_of(keys: Keyring, *secrets: bytes) -> list[str | None]:
    return [found and found.name for found in map(keys.find, secrets)]


def test_a_line_is_a_name_and_a_key_or_a_key(file: Path) -> None:
    write(file, "\ufeff# who asks\r\n\r\nalice  k-1\n\tbob\tk-2 # since May\nk#3\n  # k-4\nteam/a@b.c k-5\n")
    keys = Keyring(("first", "second"), [file])
    found = names_of(keys, b"first", b"second", b"k-1", b"k-2", b"k#3", b"k-5")
    assert found == ["key-1", "key-2", "alice", "bob", "keys:5", "team/a@b.c"]
    assert names_of(keys, b"", b"alice", b"k-", b"k-11", b"k-4", b"#", b"K-1", b"\xff") == [None] * 8


def test_a_name_may_have_an_old_key_and_a_new_one(file: Path) -> None:
    write(file, "alice old\nalice new\n")
    assert names_of(Keyring((), [file]), b"old", b"new") == ["alice", "alice"]


WRONG = [
    ("", "has no keys"),
    ("# nothing\n\n", "has no keys"),
    ("alice s3cret more\n", "line 1: it must be NAME KEY"),
    ("k\nalice s3crét\n", "line 2: a key must be printable ASCII"),
    ("alice s3cret\x07\n", "line 1: a key must be printable ASCII"),
    ("al,ice s3cret\n", "line 1: a name must be"),
    ("a" * 65 + " s3cret\n", "line 1: a name must be"),
    (b"s3cret\xff\xfe\n", "is not text in UTF-8"),
    (b"s3cret\n" * (MOST_BYTES // 7 + 1), f"is larger than {MOST_BYTES} bytes"),
    (None, "cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_a_wrong_file_stops_the_start_and_is_not_quoted(file: Path, text: str | bytes | None, says: str) -> None:
    write(file, text)
    with pytest.raises(StartupError) as error:
        Keyring((), [file])
    assert f"--api-key-file '{file}' " in str(error.value)
    assert says in str(error.value)
    assert "s3cr" not in str(error.value)


def test_a_changed_file_is_read_again_once_it_has_settled(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(file, "alice s3cret-1\n")
    keys = Keyring((), [file])
    settle(keys)
    with caplog.at_level(logging.INFO):
        write(file, "alice s3cr")  # it is being written
        keys.refresh()
        write(file, "alice s3cret-2\nbob s3cret-3\n")
        keys.refresh()
        assert names_of(keys, b"s3cret-1", b"s3cr", b"s3cret-2") == ["alice", None, None]
        keys.refresh()
    assert names_of(keys, b"s3cret-1", b"s3cret-2", b"s3cret-3") == [None, "alice", "bob"]
    assert caplog.messages == [f"--api-key-file '{file}' has changed. Its keys are now those of: alice, bob"]


def test_a_file_that_changes_right_after_the_start_is_read_although_its_time_is_the_same(file: Path) -> None:
    write(file, "alice s3cret-1\n")
    found = file.stat()
    keys = Keyring((), [file])
    file.write_text("alice s3cret-2\n")
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    settle(keys)
    assert names_of(keys, b"s3cret-2") == ["alice"]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_a_broken_version_keeps_the_keys_and_is_one_error(
    file: Path, text: str | bytes | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, "alice s3cret-1\n")
    keys = Keyring((), [file])
    write(file, text)
    for _ in range(5):
        keys.refresh()
    assert names_of(keys, b"s3cret-1") == ["alice"]
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert says in record.getMessage()
    assert "s3cr" not in record.getMessage()
    write(file, "alice s3cret-2\n")
    settle(keys)
    assert names_of(keys, b"s3cret-2") == ["alice"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text() | st.binary())
def test_any_file_has_keys_or_stops_the_start(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    try:
        keys = Keyring((), [file])
    except StartupError:
        return
    assert names_of(keys, b"") == [None]


@pytest.mark.parametrize(
    ("mode", "is_exposed"), [(0o600, False), (0o440, False), (0o640, False), (0o644, True), (0o660, True)]
)
def test_a_file_that_others_can_read_or_change_gets_a_warning(file: Path, mode: int, is_exposed: bool) -> None:
    write(file, "s3cret")
    file.chmod(mode)
    warning = exposure(file)
    assert (warning is not None) == is_exposed
    assert "s3cret" not in (warning or "")
