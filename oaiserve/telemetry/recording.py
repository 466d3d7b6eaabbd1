"""Records ended requests in a file from which the load can be replayed: arrivals, lengths and common prefixes, but no
text.

The format is that of `oaiserve.wire.recordings`: a line for each prompt of a request, with the fields of the load
test's `--requests`, and now and then the cost of steps. Each block of 64 tokens is hashed together with all tokens
before it, so two prompts with a common prefix begin with the same hashes. The salt of the hashes is random and is never
written, so nobody can guess a prompt and look up its hash.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from oaiserve.errors import StartupError
from oaiserve.facts.record import POOLING_OPERATIONS, Cause, EngineAccount, RequestRecord
from oaiserve.facts.times import EpochOffset
from oaiserve.storage.private import FILE_MODE
from oaiserve.wire.recordings import BLOCK_TOKENS, HASH_BYTES, head

logger = logging.getLogger(__name__)

COST_EVERY = 50  # number of requests after which the cost of steps is written again, so that a growing file can be read
MOST_BYTES = 64 * 2**20  # size at which a new file is begun; only the previous file is kept


class Recording:
    """A file to which ended requests are added. Telemetry thread only.

    While the disk is full, requests are missing from it. Once there is space, the recording continues and states how
    many are missing.

    `server` has the settings that a replay needs. `step_cost` returns the numbers of the estimated cost of steps, or
    None. `epoch_offset_ns` turns stamps into Unix time. Raises StartupError if the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        server: Mapping[str, Any],
        step_cost: Callable[[], Mapping[str, Any] | None],
        epoch_offset_ns: EpochOffset,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._path = path
        self._server = dict(server)
        self._step_cost = step_cost
        self._epoch_offset_ns = epoch_offset_ns
        self._most_bytes = most_bytes
        self._salt = secrets.token_bytes(16)
        self._cost: Mapping[str, Any] | None = None  # the cost that was written last
        self._num_since_cost = 0  # requests since the cost was written
        self._num_missing = 0  # requests lost since the last one that was written
        self._file: int | None = None  # None if no file could be opened
        try:
            if path.is_file() and path.stat().st_size:
                self._rotate()  # An earlier server has hashed with another salt.
            self._open()
        except OSError as error:
            raise StartupError(
                f"--record-requests is '{path}', which cannot be written to: {error.strerror}."
            ) from error

    def add(self, record: RequestRecord) -> None:
        """Add the prompts of a request, unless it was for vectors or scores.

        Raises OSError, with the file's name, if the disk has no space for it. Later requests are still tried.
        """
        if record.operation in POOLING_OPERATIONS:
            return
        try:
            if self._file is not None and os.fstat(self._file).st_size > self._most_bytes:
                self._close_file()
                self._rotate()
            if self._file is None:
                self._open()
            self._write(self._rows(record))
        except OSError:
            self._num_missing += 1
            raise
        if self._num_missing:
            logger.info("The recording %s goes on; requests missing from it: %d", self._path, self._num_missing)
            self._num_missing = 0
        self._num_since_cost += 1
        if self._num_since_cost >= COST_EVERY:
            self._write_cost()

    def close(self) -> None:
        if self._num_missing:
            logger.warning("The last requests are missing from the recording %s: %d", self._path, self._num_missing)
        if self._file is not None:
            self._close_file()

    def _close_file(self) -> None:
        assert self._file is not None
        try:
            self._write_cost()
        except OSError as error:
            logger.warning("What steps cost is not in the recording %s: %s", self._path, error.strerror)
        os.close(self._file)
        self._file = None

    def _write_cost(self) -> None:
        self._num_since_cost = 0
        cost = self._step_cost()
        if cost is not None and cost != self._cost:
            self._write([{"step_cost": cost}])
            self._cost = cost

    def _rows(self, record: RequestRecord) -> list[dict[str, Any]]:
        account = record.account
        times = record.times
        # Empty if the request was rejected before its prompts were tokenized.
        prompts: Sequence[list[int] | None] = account.prompts or [None]
        received_ns = times.phases()[0].start_ns
        num_choices = max(1, account.num_choices // len(prompts))
        common = {
            "timestamp": (received_ns + self._epoch_offset_ns()) / 1e9,
            "output_length": -(-record.completion_tokens // max(1, account.num_choices)),
            "n": num_choices,
            "operation": record.operation,
            "model": record.adapter,
            "client": None if record.client is None else self._hash(record.client.encode()).hex(),
            "stream": record.stream,
            "outcome": record.outcome.value,
            "status": record.http_status,
            "finish_reasons": record.answer_reasons,
            "cached_tokens": record.cached_tokens,
            "num_steps": account.num_steps,
            "drafts": draft_runs(account),
            "host_ns": sum(causes_ns.get(Cause.HOST, 0) for causes_ns in record.causes_ns.values()),
            "causes_ns": record.causes_ns,
            "queue_waits_ns": account.waits_ns,
            "phases_ns": {phase.name: phase.duration_ns for phase in times.phases()},
            "params": dict(record.params),
        }
        salt = f"{record.adapter} {account.cache_salt}".encode()
        return [
            common
            if token_ids is None
            else common | {"input_length": len(token_ids), "blocks": self._blocks(salt, token_ids)}
            for token_ids in prompts
        ]

    def _blocks(self, salt: bytes, token_ids: Sequence[int]) -> str:
        """Return the hashes of a prompt's whole blocks, as concatenated hexadecimal digits."""
        last = self._hash(salt)
        hashes = []
        for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            last = self._hash(last + array("q", token_ids[start : start + BLOCK_TOKENS]).tobytes())
            hashes.append(last)
        return b"".join(hashes).hex()

    def _hash(self, content: bytes) -> bytes:
        return blake2b(content, digest_size=HASH_BYTES, key=self._salt).digest()

    def _open(self) -> None:
        """Begin a file with its first line. If the disk has no space for the line, the file is closed again and stays
        empty."""
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
        self._cost = None
        try:
            self._write([head(self._server)])
        except OSError:
            os.close(self._file)
            self._file = None
            raise

    def _rotate(self) -> None:
        os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        content = b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)
        assert self._file is not None
        before = os.fstat(self._file).st_size
        try:
            is_whole = os.write(self._file, content) == len(content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        if not is_whole:  # Half a line would corrupt the next one.
            os.ftruncate(self._file, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))


def draft_runs(account: EngineAccount) -> list[int]:
    """Return the lengths of the runs in an answer, alternating between tokens that a step generated alone, and tokens
    that came together, because drafts were accepted or a grammar forced them.

    The first token counts as generated alone. The list is empty for requests with several choices, whose tokens can't
    be attributed, and for those without accepted drafts.
    """
    if not account.num_accepted_tokens or account.num_choices != 1:
        return []
    runs = [1]
    several = False
    gaps_ns = account.inter_token_ns
    for index, gap_ns in enumerate(gaps_ns):
        # Only the first token of a step has a gap before it; the others come at the same time.
        in_several = gap_ns == 0 or (index + 1 < len(gaps_ns) and gaps_ns[index + 1] == 0)
        if in_several != several:
            runs.append(0)
            several = in_several
        runs[-1] += 1
    return runs
