"""Checks the gateway in front of engines of other kinds, with these engines."""
