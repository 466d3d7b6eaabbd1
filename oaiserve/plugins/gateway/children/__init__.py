"""Servers as child processes of a gateway: one for each of several models, started, restarted and stopped here."""
