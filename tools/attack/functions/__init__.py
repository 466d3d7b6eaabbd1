"""Functions that read what clients and models write, with the input that costs them most. None needs a server.

Each module yields its cases, and `tools.attack.growth --functions` measures them.
"""
