"""The command `oaiserve route`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from oaiserve.commands.file_checks import check_tls
from oaiserve.commands.listening import bind
from oaiserve.commands.settings import flags_of
from oaiserve.config import OptionError
from oaiserve.plugins.gateway.options import RouteOptions


def command(
    *urls: Annotated[str, Parameter(show=False)],
    config: Path | None = None,
    options: Annotated[RouteOptions, flags_of("Route", 1)] = RouteOptions(),  # noqa: B008 - frozen
) -> int:
    """Run a gateway, which sends each request to the server that has most of its prompt cached.

    Each flag is also an environment variable (--replica-key: OAISERVE_REPLICA_KEY) and a key in the config file.

    Parameters
    ----------
    config
        Read settings from this file (.toml, .yaml or .json).
    """
    if urls:
        flags = " ".join(f"--replica {url}" for url in urls)
        raise OptionError(f"Unexpected argument '{' '.join(urls)}'. 'oaiserve route' takes flags only, as in {flags}.")
    if not options.replica:
        raise OptionError("--replica is missing. Give one for each server, as in --replica http://10.0.0.5:8000.")
    check_tls(options.tls_certificate, options.tls_key)
    with bind(options.host, options.port) as sock:
        from oaiserve.plugins.gateway.serve import serve_gateway  # its import is slow

        return serve_gateway(options, sock)
