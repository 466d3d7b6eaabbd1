"""`oaiserve` for the snippets of the docs: all of it is real, but a server ends when it has checked its settings."""

import sys

from oaiserve import cli


def ends_at_once(*_: object) -> int:
    return 0


if __name__ == "__main__":
    cli._serve_app = ends_at_once
    cli._serve_models = ends_at_once
    cli._route = ends_at_once
    sys.exit(cli.main())
