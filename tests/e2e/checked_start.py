"""`oaiserve` for the snippets of the docs: all of it is real, but a server ends when it has checked its settings."""

import sys

from oaiserve import cli
from oaiserve.plugins.gateway import serve


def ends_at_once(*_: object, **__: object) -> int:
    return 0


if __name__ == "__main__":
    cli.serve_model = ends_at_once
    serve.serve_models = ends_at_once
    serve.serve_gateway = ends_at_once
    sys.exit(cli.main())
