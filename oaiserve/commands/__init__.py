"""The small commands beside `serve`: models on this disk, servers that run, chat, and tools that use a server.

Each file has one command, the function `command`, whose parameters are its flags.
"""
