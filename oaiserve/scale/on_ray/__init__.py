"""Replicas of the server under Ray Serve: Ray places, watches, replaces and drains them, and HAProxy is in front.

No token passes through Ray's Python: HAProxy connects each client with a replica's own HTTP server. How to run it is in
deploy/ray/README.md, what it costs and survives in docs/scale.md.
"""
