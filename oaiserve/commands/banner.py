"""The lines that a server prints when it is ready: what it is, its addresses, and a command to try."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from oaiserve.config import Config, ServerOptions
from oaiserve.screen import Screen

_LABEL_WIDTH = 10
OPENED_BY = "--api-key to open it for clients with a key, or --open-dashboard for all"  # flags that open the pages


@dataclass(frozen=True, slots=True)
class Banner:
    """The lines that a server prints at its start. The title contains its address, and each fact has a label."""

    title: str
    facts: Mapping[str, str]
    example: str = ""  # a command to try
    closing: str = "Ctrl-C stops the server."

    def text(self, screen: Screen) -> str:
        """Return the lines, wrapped for the screen. Addresses and commands stay whole, so that they can be copied."""
        columns = screen.columns() or 100
        title = textwrap.wrap(self.title, columns, break_long_words=False, break_on_hyphens=False)
        lines = ["", *(screen.painted(line, "bold") for line in title), ""]
        for label, fact in self.facts.items():
            width = max(20, columns - _LABEL_WIDTH - 2)
            wrapped = textwrap.wrap(fact, width, break_long_words=False, break_on_hyphens=False) or [""]
            lines.append(f"  {screen.painted(label.ljust(_LABEL_WIDTH), 'dim')}{wrapped[0]}")
            lines += [" " * (_LABEL_WIDTH + 2) + line for line in wrapped[1:]]
        lines.append("")
        if self.example:
            lines += ["  Try it:", textwrap.indent(self.example, "  "), ""]
        lines += [f"  {line}" for line in textwrap.wrap(self.closing, max(20, columns - 2))]
        return "\n".join([*lines, ""])


def address(server: ServerOptions, port: int) -> str:
    """Return the URL of a server for this machine."""
    return url_of(server, {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host), port)


def url_of(server: ServerOptions, host: str, port: int) -> str:
    scheme = "http" if server.tls_certificate is None else "https"
    if ":" in host and not host.startswith("["):
        return f"{scheme}://[{host}]:{port}"
    return f"{scheme}://{host}:{port}"


def places(config: Config, url: str, page: str, *, has_pages: bool, opened_by: str = OPENED_BY) -> dict[str, str]:
    if not has_pages:
        return {"API": f"{url}/v1"}
    closed = f"closed: give {opened_by}"
    return {"API": f"{url}/v1", page: f"{url}/" if config.shows_dashboard else closed}
