"""A process of a shared database knows which others have ended, and leaves no files behind."""

from pathlib import Path

import pytest

from oaiserve.errors import StartupError
from oaiserve.plugins.responses.process_claim import NOBODY, ProcessClaim


def test_process_is_alive_until_it_gives_up_its_claim(tmp_path: Path) -> None:
    path = tmp_path / "store[1].db"
    one = ProcessClaim(path)
    two = ProcessClaim(path)
    assert one.is_alive(one.name)
    assert one.is_alive(two.name)
    assert not one.is_alive(NOBODY)
    assert not one.is_alive("0123")
    two.close()
    assert not one.is_alive(two.name)
    one.close()
    assert [*tmp_path.iterdir()] == []


def test_file_of_a_killed_process_counts_as_none_and_is_removed_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    alive = ProcessClaim(path)
    (tmp_path / "store.db-process-killed").touch()  # no lock, as after a kill
    assert not alive.is_alive("killed")
    ProcessClaim(path).close()
    assert [file.name for file in tmp_path.iterdir()] == [f"store.db-process-{alive.name}"]
    alive.close()


def test_database_that_nobody_shares_has_one_process() -> None:
    claim = ProcessClaim(None)
    assert claim.is_alive(claim.name)
    assert not claim.is_alive("another")
    claim.close()


def test_claim_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="next to --response-store.*No such file"):
        ProcessClaim(tmp_path / "missing" / "store.db")
