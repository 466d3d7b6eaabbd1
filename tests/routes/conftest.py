"""The real servers around scripted engines that tests of routes ask."""

from tests.serving import served_on_a_port
from tests.world.serving import place, place_session, serve, serve_session, served

__all__ = ["place", "place_session", "serve", "serve_session", "served", "served_on_a_port"]
