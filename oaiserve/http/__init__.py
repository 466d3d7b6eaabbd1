"""Connections and access: the listening socket, uvicorn's server, limits of connections, and keys."""
