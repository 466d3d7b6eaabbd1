"""The command `oaiserve route`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from oaiserve.commands.file_checks import check_tls
from oaiserve.commands.listening import bind
from oaiserve.commands.settings import flags_of
from oaiserve.config import OptionError
from oaiserve.plugins.gateway.options import EnginesOptions, RouteOptions


def command(
    *urls: Annotated[str, Parameter(show=False)],
    config: Path | None = None,
    options: Annotated[RouteOptions, flags_of("Route", 1)] = RouteOptions(),  # noqa: B008 - frozen
    engines: Annotated[EnginesOptions, flags_of("Other engines", 2)] = EnginesOptions(),  # noqa: B008 - likewise
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
    if options.replica and engines.engine:
        raise OptionError("--replica and --engine do not go together: a gateway has servers of one kind.")
    if not options.replica and not engines.engine:
        raise OptionError(
            "--replica is missing. Give one for each server, as in --replica http://10.0.0.5:8000, or --engine for "
            "each server of another engine than oaiserve."
        )
    check_tls(options.tls_certificate, options.tls_key)
    with bind(options.host, options.port) as sock:
        if engines.engine:
            from oaiserve.plugins.gateway.engines.serve import serve_engines  # its import is slow, too

            return serve_engines(options, engines, sock)
        from oaiserve.plugins.gateway.serve import serve_gateway  # its import is slow

        return serve_gateway(options, sock, ignores_keys=bool(engines.api_key or engines.api_key_file))
