"""Simulates fleets of replicas under several policies of routing, without models: docs/scale.md.

Time passes as a formula says (tools.simulate.Costs), the router is the real one, and so are scheduler, block pool and
prefix cache of each replica where that is affordable (`replica.py`). Fleets of hundreds have a model of a replica in
their place (`coarse.py`), which is compared with the real one.
"""
