"""Replicas under Ray Serve: Ray places, watches, replaces and scales them, and `oaiserve route` sends them requests.

Each replica is an ordinary server in a child process, with an HTTP port of its own. No token passes through Ray.
deploy/ray/README.md says how to run it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oaiserve.plugin import Plugin

plugin = Plugin(name="ray")  # Ray Serve imports `app`. The plug-in adds nothing to a server.


def app(args: Mapping[str, Any]) -> Any:
    """Return the application for Ray Serve, as in `serve run oaiserve.plugins.ray:app model=demo`.

    The arguments are the settings of `oaiserve serve`. It needs the extra `oaiserve[ray]`.
    """
    from oaiserve.plugins.ray.application import build

    return build(args)
