"""Tests the table of keys: what may be used in a minute and in a day, by one process or several; and the keys."""

import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from oaiserve.errors import RateLimited, StartupError
from oaiserve.http.keys import Right
from oaiserve.plugins.keys.key_table import DAY, KeyTable, Limits, StoredKey, Use
from oaiserve.plugins.shared import database

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # for the processes that share the file
MIDNIGHT = 20_000 * DAY  # a day's first second


class Clock:
    def __init__(self, now: float = MIDNIGHT + 1000.5) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(tmp_path: Path, clock: Clock) -> Iterator[KeyTable]:
    with closing(KeyTable(tmp_path / "store", clock)) as opened:
        yield opened


def added(table: KeyTable, name: str = "alice", **values: Any) -> StoredKey:
    digest = sha256(table.add(name, values).encode()).digest()
    return table.valid()[digest]


def reserved(table: KeyTable, key: StoredKey, tokens: int = 0) -> Use:
    use = Use(key)
    with table.transaction():
        table.reserve(use, tokens)
    return use


def refused(table: KeyTable, key: StoredKey, tokens: int = 0) -> RateLimited:
    with pytest.raises(RateLimited) as error:
        reserved(table, key, tokens)
    return error.value


def settled(table: KeyTable, use: Use, tokens: int, cost: float = 0.0) -> None:
    with table.transaction():
        table.settle(use, tokens, cost)


# -- keys -------------------------------------------------------------------------------------------------------------


def test_the_file_has_only_the_digest_of_a_key_and_is_its_owners(table: KeyTable, tmp_path: Path) -> None:
    key = table.add("alice", {"role": "admin", "requests_per_day": 7, "models": ["demo"], "priority": 2})
    (found,) = table.valid().values()
    assert (found.name, found.rights, found.models, found.priority) == ("alice", ~Right(0), ("demo",), 2)
    assert found.limits == Limits(requests_per_day=7)
    assert len(key) == len("sk-") + 43  # 256 bits
    files = [*tmp_path.iterdir()]
    assert not any(key.encode() in file.read_bytes() or key[3:].encode() in file.read_bytes() for file in files)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_a_change_keeps_the_rest_and_a_revoked_key_stays_in_the_list_only(table: KeyTable) -> None:
    first = added(table, role="watch", tokens_per_minute=5, requests_per_minute=6)
    version = table.version()
    table.change("alice", {"tokens_per_minute": 0, "requests_per_day": 9, "role": None})
    (key,) = table.valid().values()
    assert (key.rights, key.limits) == (Right.WATCH, Limits(requests_per_minute=6, requests_per_day=9))
    table.revoke("alice")
    assert (table.valid(), table.version()) == ({}, version + 2)
    second = added(table)
    assert second.digest != first.digest
    assert [(key["name"], key["revoked"] is None) for key in table.listed()] == [("alice", True), ("alice", False)]


def test_a_key_has_the_share_that_it_was_given_last_or_else_the_default(tmp_path: Path) -> None:
    table = KeyTable(tmp_path / "keys.db", default_share=0.5)
    table.add("alice", {"share": 3.0})
    table.add("bob", {"role": "watch"})
    assert {key.name: key.share for key in table.valid().values()} == {"alice": 3.0, "bob": 0.5}
    table.change("bob", {"share": 2})
    table.change("alice", {"requests_per_day": 9})
    assert {key.name: key.share for key in table.valid().values()} == {"alice": 3.0, "bob": 2.0}
    table.revoke("alice")
    table.add("alice", {})
    assert {key.name: key.share for key in table.valid().values()} == {"alice": 0.5, "bob": 2.0}
    assert [key["share"] for key in table.listed()] == [None, 2.0, 3.0]


def test_a_file_that_has_no_shares_yet_gets_them(tmp_path: Path) -> None:
    table = KeyTable(tmp_path / "keys.db")
    table.add("alice", {})
    table.close()
    with closing(sqlite3.connect(tmp_path / "keys.db")) as before:
        before.execute("DROP TABLE shares")
    with closing(KeyTable(tmp_path / "keys.db")) as after:
        assert [key.share for key in after.valid().values()] == [1.0]


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (lambda table: table.add("alice", {}), "There is a key 'alice' already"),
        (lambda table: table.add("a b", {}), "'a b' cannot be the name of a key: a name must be"),
        (lambda table: table.add("b", {"tokens_per_day": -1}), "--tokens-per-day is -1"),
        (lambda table: table.add("b", {"cost_per_day": float("nan")}), "--cost-per-day is nan"),
        (
            lambda table: table.add("b", {"tokens_per_day": 2**63}),
            "--tokens-per-day is 9223372036854775808, but must be",
        ),
        (
            lambda table: table.change("alice", {"priority": -(2**63)}),
            "--priority is -9223372036854775808, but must be",
        ),
        (lambda table: table.change("alice", {"share": 0.0}), "--share is 0, but must be between 0.001 and 1000"),
        (lambda table: table.add("b", {"share": float("nan")}), "--share is nan, but must be"),
        (lambda table: table.change("alice", {}), "Nothing is given"),
        (lambda table: table.change("bob", {"role": "use"}), "no valid key 'bob'"),
        (lambda table: table.revoke("bob"), "no valid key 'bob'"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(table: KeyTable, work: Callable[[KeyTable], object], says: str) -> None:
    table.add("alice", {})
    with pytest.raises(StartupError, match=says):
        work(table)


def open_cats(path: Path) -> None:
    """Open the file as another part of the server does."""
    database.opened(path, ("CREATE TABLE IF NOT EXISTS cats (name TEXT)",)).close()


def open_keys(path: Path) -> None:
    KeyTable(path).close()


def test_keys_and_other_parts_share_a_file_whichever_comes_first(tmp_path: Path) -> None:
    for name, first, second in (("a", open_cats, open_keys), ("b", open_keys, open_cats)):
        first(tmp_path / name)
        second(tmp_path / name)
        with closing(sqlite3.connect(tmp_path / name)) as connection:
            found = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        assert {"keys", "uses", "cats"} <= {row[0] for row in found}
    other = tmp_path / "other"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE cats (name TEXT)")
    with pytest.raises(StartupError, match="another program"):
        KeyTable(other)


def test_what_another_process_changes_reaches_every_connection_of_this_one(table: KeyTable, tmp_path: Path) -> None:
    """To close a file ends all locks of a process on it, so another one would take the log for its own."""
    with closing(KeyTable(tmp_path / "store")) as second:
        for name in ("alice", "bob"):
            words = [sys.executable, "-m", "oaiserve", "keys", "add", name, "--response-store", str(tmp_path / "store")]
            subprocess.run(words, check=True, env=ENVIRONMENT)
            open_keys(tmp_path / "store")
        table.add("carol", {})
        with closing(KeyTable(tmp_path / "store")) as third:
            found = [sorted(key.name for key in each.valid().values()) for each in (table, second, third)]
    assert found == [["alice", "bob", "carol"]] * 3


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_minute_gives_back_what_was_used_60_seconds_ago(table: KeyTable, clock: Clock) -> None:
    key = added(table, requests_per_minute=2)
    reserved(table, key)
    clock.now += 20
    assert reserved(table, key).left == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "61s",
    }
    clock.now += 20
    error = refused(table, key)
    assert (error.status, error.type, error.code) == (429, "requests", "rate_limit_exceeded")
    assert error.headers() == {"retry-after": "21"}
    clock.now += 20.4
    refused(table, key)
    clock.now += 0.1  # the first is more than 60 seconds ago, whatever part of its second it was in
    reserved(table, key)
    assert refused(table, key).headers() == {"retry-after": "20"}


def test_what_a_request_used_beyond_its_reservation_counts_when_it_ends(table: KeyTable, clock: Clock) -> None:
    key = added(table, tokens_per_minute=100)
    use = reserved(table, key, 50)
    clock.now += 70
    settled(table, use, 140)
    assert table.listed()[0]["tokens_today"] == 140
    clock.now += 59
    reserved(table, key, 10)
    refused(table, key, 1)


def test_a_request_of_more_than_a_limit_is_not_to_be_tried_again(table: KeyTable) -> None:
    error = refused(table, added(table, tokens_per_minute=100), 101)
    assert "limit 100, used 0, requested 101. Ask for fewer tokens." in error.message
    assert error.headers() == {"x-should-retry": "false"}


@pytest.mark.parametrize("unit", ["requests", "tokens", "cost"])
def test_a_day_ends_at_midnight(table: KeyTable, clock: Clock, unit: str) -> None:
    key = added(table, **{f"{unit}_per_day": 2})
    clock.now = MIDNIGHT + DAY - 100
    for _ in range(2):
        settled(table, reserved(table, key, 1), 1, 1.5)
    error = refused(table, key, 1)
    assert (error.type, error.code, error.retry_after_seconds) == ("insufficient_quota", "insufficient_quota", 100)
    clock.now += 100
    reserved(table, key, 1)
    (listed,) = table.listed()
    assert (listed["requests_today"], listed["cost_today"], listed["last_used"]) == (1, 0.0, clock.now)


def test_headers_tell_of_the_limit_with_the_least_left(table: KeyTable, clock: Clock) -> None:
    key = added(table, requests_per_minute=5, requests_per_day=3, tokens_per_day=1000)
    clock.now = MIDNIGHT + 3600
    headers = reserved(table, key, 10).left
    found = [headers[f"x-ratelimit-{what}-requests"] for what in ("limit", "remaining", "reset")]
    assert (found, headers["x-ratelimit-remaining-tokens"]) == (["3", "2", "82800s"], "990")


def test_rows_of_the_past_go(table: KeyTable, clock: Clock, tmp_path: Path) -> None:
    key = added(table, requests_per_minute=5)
    free = added(table, "free")
    for _ in range(300):
        clock.now += 12.5
        settled(table, reserved(table, key, 10), 5)
        settled(table, Use(free, admitted=clock.now), 5)
    with closing(database.opened(tmp_path / "store", ())) as connection:
        (number,) = connection.execute("SELECT count(*) FROM uses").fetchone()
    assert number <= 2 * 7


@dataclass
class Asked:
    use: Use
    at: float
    tokens: int  # first reserved, then used
    beyond: int = 0
    beyond_at: float = 0.0


TODAY = ("requests", "tokens")
LIMITS = {"requests_per_minute": 4, "tokens_per_minute": 60, "requests_per_day": 12, "tokens_per_day": 150}


class Processes(RuleBasedStateMachine):
    """Two processes that share a file, as two tables, next to a plain list of all admitted requests."""

    uses = Bundle("uses")

    @initialize()
    def begin(self) -> None:
        self.clock = Clock(MIDNIGHT + DAY - 200)
        self.path = Path(mkdtemp()) / "store"
        self.tables = [KeyTable(self.path, self.clock) for _ in range(2)]
        self.key = added(self.tables[0], **LIMITS)
        self.all: list[Asked] = []

    def used(self, seconds: float) -> dict[str, int]:
        """Return the use that counts against each limit, if a minute has this many seconds."""
        since = self.clock.now - seconds
        midnight = self.clock.now // DAY * DAY
        recent, today = ([one for one in self.all if one.at >= start] for start in (since, midnight))
        beyond = sum(one.beyond for one in self.all if one.beyond_at >= since)
        tokens = sum(one.tokens for one in recent) + beyond, sum(one.tokens + one.beyond for one in today)
        return dict(zip(LIMITS, (len(recent), tokens[0], len(today), tokens[1]), strict=True))

    @rule(seconds=st.sampled_from([0.25, 1.0, 7.5, 30.0, 59.25, 61.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(process=st.integers(0, 1), tokens=st.integers(0, 70), target=uses)
    def ask(self, process: int, tokens: int) -> Asked | None:
        wanted = {name: tokens if name.startswith("tokens") else 1 for name in LIMITS}
        try:
            use = reserved(self.tables[process], self.key, tokens)
        except RateLimited:
            used = self.used(61)  # a second counts as a whole, so what is refused may be free up to a second later
            assert any(used[name] + max(1, wanted[name]) > limit for name, limit in LIMITS.items())
            return None
        used = self.used(60)
        assert all(used[name] + wanted[name] <= limit for name, limit in LIMITS.items())
        self.all.append(Asked(use, self.clock.now, tokens))
        return self.all[-1]

    @rule(process=st.integers(0, 1), asked=consumes(uses), used=st.integers(0, 90))
    def end(self, process: int, asked: Asked | None, used: int) -> None:
        if asked is not None:
            settled(self.tables[process], asked.use, used)
            asked.beyond = max(0, used - asked.tokens)
            asked.beyond_at = self.clock.now
            asked.tokens = min(used, asked.tokens)

    def teardown(self) -> None:
        for table in getattr(self, "tables", []):
            table.close()

    @rule(process=st.integers(0, 1))
    def restart(self, process: int) -> None:
        self.tables[process].close()
        self.tables[process] = KeyTable(self.path, self.clock)

    @invariant()
    def the_list_says_what_was_used(self) -> None:
        if self.all:
            (listed,) = self.tables[0].listed()
            used = self.used(0)
            assert [listed[f"{what}_today"] for what in TODAY] == [used[f"{what}_per_day"] for what in TODAY]


Processes.TestCase.settings = settings(max_examples=30, stateful_step_count=40)
test_no_limit_is_exceeded_and_every_reservation_settles = Processes.TestCase


ASKS = """
import sys
from pathlib import Path
from oaiserve.errors import RateLimited
from oaiserve.plugins.keys.key_table import KeyTable, Use
table = KeyTable(Path(sys.argv[1]), lambda: 1_728_000_500.0)
(key,) = table.valid().values()
print("ready", flush=True)
sys.stdin.readline()
admitted = 0
for _ in range(100):
    try:
        with table.transaction():
            table.reserve(Use(key), 3)
        admitted += 1
    except RateLimited:
        pass
print(admitted)
"""


def test_processes_that_ask_at_once_get_no_more_than_the_limit(table: KeyTable, tmp_path: Path) -> None:
    added(table, requests_per_minute=200)
    command = [sys.executable, "-c", ASKS, str(tmp_path / "store")]
    pipe = subprocess.PIPE
    children = [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=ENVIRONMENT, text=True) for _ in range(3)]
    assert [child.stdout.readline() for child in children] == ["ready\n"] * 3
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    numbers = [int(child.communicate()[0]) for child in children]
    assert sum(numbers) == 200


@pytest.mark.parametrize("change", ["role = 'other'", "models = 'x'", "models = '[[['", "models = 7"])
def test_a_table_of_keys_that_cannot_be_read_is_one_sentence(tmp_path: Path, change: str) -> None:
    path = tmp_path / "store"
    with closing(KeyTable(path)) as table:
        table.add("alice", {})
    with closing(sqlite3.connect(path)) as other, other:
        other.execute(f"UPDATE keys SET {change}")
    with (
        closing(KeyTable(path)) as table,
        pytest.raises(StartupError, match="^--response-store is '[^\n]*', which cannot be used: [^\n]*[.]$"),
    ):
        table.valid()
