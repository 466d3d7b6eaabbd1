"""Several replicas of the server: the router chooses one for each request. `on_ray` runs them under Ray Serve.

The modules directly in this folder serve nothing, and need neither a network nor Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(args: Mapping[str, Any]) -> Any:
    """Return the application for Ray Serve, as in `serve run oaiserve.scale:app model=demo`.

    The arguments are the settings of `oaiserve serve`. It needs the extra `oaiserve[ray]`.
    """
    from oaiserve.scale.on_ray.application import build

    return build(args)
