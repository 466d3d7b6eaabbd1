"""`Address`: the address on which a replica listens."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Address(NamedTuple):
    """The address of one replica: an IP address with a port, or a Unix socket."""

    ip: str
    port: int
    host: str  # value of the header Host, with the port
    tls_name: str | None = None  # the name in its certificate; None: plain HTTP
    path: Path | None = None  # the Unix socket's path, instead of IP address and port
    label: str = ""  # shown to operators instead of the name

    @property
    def name(self) -> str:
        if self.path is not None:
            return str(self.path)
        ip = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"{ip}:{self.port}"

    @classmethod
    def of_socket(cls, path: Path, label: str = "") -> Address:
        return cls("", 0, "localhost", path=path, label=label)
