"""Replicas under Ray Serve: Ray places, watches, replaces and scales them, and `oaiserve route` sends them requests.

Each replica is an ordinary server in a child process, with an HTTP port of its own. No token passes through Ray.
deploy/ray/README.md says how to run it.
"""

from oaiserve.plugin import Plugin

plugin = Plugin(name="ray")  # Ray Serve imports `application`. A server has no part of it.
