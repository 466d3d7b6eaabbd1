"""`Address`: the address on which a replica listens."""

from __future__ import annotations

from typing import NamedTuple


class Address(NamedTuple):
    """The address of one replica."""

    ip: str
    port: int
    host: str  # value of the header Host, with the port
    tls_name: str | None = None  # the name in its certificate; None: plain HTTP

    @property
    def name(self) -> str:
        ip = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"{ip}:{self.port}"
