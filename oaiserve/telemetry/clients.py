"""`Clients` sums up, over the last hour, what each client's ended requests used, how long they waited for other
clients, and how long others waited for them. It knows no HTTP. The telemetry thread writes, and any thread may read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import Lock

import msgspec

from oaiserve.facts.record import FURTHER_CLIENTS, Outcome, RequestRecord
from oaiserve.telemetry.series import NS_PER_SECOND

WINDOW_SECONDS = 3600  # the longest window
PIECE_SECONDS = 10  # A window consists of whole pieces of this length, and the current one.
MOST_CLIENTS = 50  # clients with a separate row in each piece; the others share one


class ClientRow(msgspec.Struct):
    """A client's requests that ended in a window. `client` is the name of its API key, empty without one.

    `waited_ns` is how long the client waited for requests of others, in the queue and in steps, and `delayed_ns` is how
    long others waited for its requests. Requests of one client that wait at the same time share that time, so that it
    counts once: otherwise, six waiting requests would charge another client's single request six times. `rejected`
    counts requests that ended with a 4xx or a 503, such as those above a limit. `requests` leaves these out, so that it
    can be compared with a limit. A cost is None if no account has one, as in a gateway for foreign engines.
    """

    client: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    machine_ns: int | None = None
    kv_byte_seconds: float | None = None
    waited_ns: int = 0
    delayed_ns: int = 0
    rejected: int = 0

    def add(self, other: ClientRow) -> None:
        for name in _SUMS:
            if (number := getattr(other, name)) is not None:
                setattr(self, name, (getattr(self, name) or 0) + number)


_SUMS = [name for name in ClientRow.__struct_fields__ if name != "client"]
Rows = dict[str, ClientRow]


class ClientList(msgspec.Struct):
    """The clients of the last `seconds`. Those that made others wait the longest come first."""

    seconds: int
    clients: list[ClientRow]


class Clients:
    """The rows of the last hour, in pieces of ten seconds, each with the number of its piece."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._lock = Lock()
        self._pieces: deque[tuple[int, Rows]] = deque()

    def add(self, record: RequestRecord) -> None:
        account = record.account
        clients_ns = account.client_waited_ns
        is_rejected = record.outcome is Outcome.REJECTED
        with self._lock:
            rows = self._rows_now()
            own = _row(rows, record.client or "")
            own.add(
                ClientRow(
                    own.client,
                    requests=0 if is_rejected else 1,
                    prompt_tokens=record.prompt_tokens,
                    cached_tokens=record.cached_tokens,
                    completion_tokens=record.generated_tokens,
                    machine_ns=account.machine_ns,
                    kv_byte_seconds=account.kv_byte_seconds,
                    waited_ns=sum(clients_ns.values()),
                    rejected=1 if is_rejected else 0,
                )
            )
            for client, ns in clients_ns.items():
                _row(rows, client).delayed_ns += ns

    def last(self, seconds: int) -> ClientList:
        """Return the clients of the last `seconds`, rounded up to a whole piece, and at most WINDOW_SECONDS."""
        first = self._piece_now() - -(-min(seconds, WINDOW_SECONDS) // PIECE_SECONDS)
        with self._lock:
            rows = [row for piece, found in self._pieces for row in found.values() if piece > first]
            return ClientList(seconds, summed(rows))

    def _piece_now(self) -> int:
        return self._clock_ns() // (PIECE_SECONDS * NS_PER_SECOND)

    def _rows_now(self) -> Rows:
        piece = self._piece_now()
        if not self._pieces or self._pieces[-1][0] != piece:
            self._pieces.append((piece, {}))
        while self._pieces[0][0] <= piece - WINDOW_SECONDS // PIECE_SECONDS:
            self._pieces.popleft()
        return self._pieces[-1][1]


def _row(rows: Rows, client: str) -> ClientRow:
    if client not in rows and len(rows) >= MOST_CLIENTS:
        client = FURTHER_CLIENTS
    return rows.setdefault(client, ClientRow(client))


def summed(rows: Iterable[ClientRow]) -> list[ClientRow]:
    """Return one row per client with the sums of its rows. Clients that made others wait the longest come first, then
    those that used the most."""
    sums: Rows = {}
    for row in rows:
        sums.setdefault(row.client, ClientRow(row.client)).add(row)
    return sorted(sums.values(), key=lambda row: (-row.delayed_ns, -(row.machine_ns or 0), row.client))
