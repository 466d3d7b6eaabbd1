"""Accounts of the time of steps and requests, and of the cost of steps."""
