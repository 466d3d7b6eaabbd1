"""Replicas of the server under Ray Serve: Ray places, watches, replaces and drains them, and HAProxy is in front.

No token passes through Ray's Python: HAProxy connects each client with a replica's own HTTP server.
deploy/ray/README.md tells how to run it, docs/scale.md its cost and the faults that it survives.
"""
