"""Front ends: processes that serve HTTP and tokenize, for the engine process.

The engine process has the engine, telemetry, the store of responses and the listening sockets. It passes accepted
connections on, and the messages of `messages.py` go to and fro. docs/architecture.md has the whole picture.
"""
