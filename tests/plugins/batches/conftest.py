"""Batches run beside their clients, whose tests poll and use threads: their servers have sockets."""

from tests.serving import serve, serve_session, served

__all__ = ["serve", "serve_session", "served"]
