"""Explanations of durations: the cost of steps, the causes of a request's time, and why two times differ."""
