"""The servers around scripted engines, and a small model, that tests of plug-ins share."""

from tests.e2e.live import small_model
from tests.serving import served_on_a_port
from tests.world.serving import place, place_of_module, place_session, serve, serve_session, served

__all__ = [
    "place",
    "place_of_module",
    "place_session",
    "serve",
    "serve_session",
    "served",
    "served_on_a_port",
    "small_model",
]
