"""`StoreOptions`: where and for how long a server stores what clients send. Plug-ins that store some share it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from oaiserve.config import Bytes, check_least, check_seconds


class StoreLimits(NamedTuple):
    """The bounds of a store. The number and the bytes count over all owners."""

    number: int
    num_bytes: int
    seconds: float  # time since a response was stored, or since a conversation that includes it was continued


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    response_store: Path | None = None
    """File that keeps the answers of /v1/responses across restarts. Servers on one machine may share it. Default:
    memory."""

    response_store_number: int = 10_000
    """Maximum number of stored responses. Beyond it, the API key with the most loses its oldest. 0: store none."""

    response_store_bytes: Bytes = Bytes("256MiB")  # noqa: RUF009 - immutable
    """Maximum size of all stored responses with their input."""

    response_store_seconds: float = 30 * 24 * 3600
    """Seconds to store a response after its conversation last continued. Default: 30 days."""

    def __post_init__(self) -> None:
        check_seconds("response_store_seconds", self.response_store_seconds)
        check_least(self, response_store_number=0, response_store_bytes=1)

    @property
    def stores_responses(self) -> bool:
        return self.response_store_number > 0

    @property
    def limits(self) -> StoreLimits:
        return StoreLimits(self.response_store_number, self.response_store_bytes, self.response_store_seconds)
