"""Replicas of the server under Ray Serve: Ray places, watches, replaces and drains them, `oaiserve route` is in front.

Each replica has an HTTP port of its own, which it lists at /cluster/targets, so no token passes through Ray's proxy.
deploy/ray/README.md tells how to run it.
"""
