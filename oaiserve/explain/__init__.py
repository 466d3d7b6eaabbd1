"""Causes of durations: the cost of steps, the causes of a request's time, and the differences of two times."""
