"""This package accounts for the time of steps and requests, and learns what a step costs."""
