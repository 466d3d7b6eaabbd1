"""Runs the first examples of real clients against the demo model: python -m tools.clients"""
