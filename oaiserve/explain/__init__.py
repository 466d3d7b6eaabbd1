"""Causes of durations: what a step costs, which part of it a request waited for, and by what two times differ."""
