"""The small commands next to `serve`: models on this disk, running servers, chat, and tools that use a server.

Each file has one command, the function `command`, whose parameters are its flags.
"""
