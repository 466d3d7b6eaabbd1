"""`oaiserve` for the snippets of the docs: all of it is real, but a server ends when it has checked its settings."""

import sys
from importlib import import_module
from importlib.util import find_spec

from oaiserve import cli


def ends_at_once(*_: object, **__: object) -> int:
    return 0


if __name__ == "__main__":
    cli.serve_model = ends_at_once
    if find_spec("oaiserve.plugins.gateway") is not None:
        import_module("oaiserve.plugins.gateway.serve").serve_gateway = ends_at_once
        import_module("oaiserve.plugins.gateway.several.serve").serve_models = ends_at_once
    sys.exit(cli.main())
