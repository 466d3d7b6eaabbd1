"""Connections, and who may ask: the listening socket, uvicorn's server, limits of connections, and keys."""
