"""Simulates a fleet of replicas under several policies of routing, without models: docs/scale.md.

Time passes as a formula says (tools.simulate.Costs), the router is the real one, and replicas are a model of the real
scheduler and prefix cache (`coarse.py`).
"""
