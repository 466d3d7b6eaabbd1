"""The command of keys finds the file of a server's settings, prints a key once, and tells a mistake in a sentence."""

from contextlib import closing
from pathlib import Path

import pytest

from oaiserve import cli
from oaiserve.plugins.keys.key_table import KeyTable


def run(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert cli.main(["keys", *argv]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_keys_are_made_listed_limited_and_revoked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "server.toml"
    config.write_text(f'response-store = "{tmp_path / "store"}"\nmax-running = 4\n')
    flags = ("--requests-per-minute", "3", "--cost-per-day", "1.5", "--model", "a", "--model", "b")
    key = run(capsys, "add", "alice", "--role", "watch", *flags, "--config", str(config))
    assert key.startswith("sk-")
    monkeypatch.setenv("OAISERVE_RESPONSE_STORE", str(tmp_path / "store"))
    assert run(capsys, "list").splitlines()[1].split("  ")[:1] == ["alice"]
    shown = run(capsys, "list")
    assert "watch  3 requests/minute, 1.5 cost/day  a, b    0 requests, 0 tokens, cost 0  never" in shown
    run(capsys, "limit", "alice", "--tokens-per-day", "2000000")
    assert "3 requests/minute, 2,000,000 tokens/day, 1.5 cost/day" in run(capsys, "list")
    run(capsys, "limit", "alice", "--requests-per-minute", "0", "--tokens-per-day", "0", "--model", "*")
    assert "watch  1.5 cost/day  all " in run(capsys, "list")
    run(capsys, "revoke", "alice")
    assert "revoked  1.5 cost/day" in run(capsys, "list")
    with closing(KeyTable(tmp_path / "store")) as table:
        assert table.valid() == {}
    assert key.strip() not in shown
    for argv, says in (
        (("limit", "alice", "--role", "use"), "There is no valid key 'alice'"),
        (("add", "a b"), "a name must be 1 to 64 letters"),
        (("add", "bob", "--role", "root"), "role"),
        (("add", "bob", "--tokens-per-day", "-1"), "--tokens-per-day is -1"),
    ):
        assert says in run(capsys, *argv, code=2)
    monkeypatch.setenv("OAISERVE_RESPONSE_STORE", str(tmp_path / "empty"))
    assert run(capsys, "list") == "There are no keys yet. To create one: oaiserve keys add NAME\n"
    monkeypatch.delenv("OAISERVE_RESPONSE_STORE")
    assert "--response-store" in run(capsys, "list", code=2)
