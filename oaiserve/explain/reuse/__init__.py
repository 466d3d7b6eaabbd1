"""Explains how much of a prompt was reused from earlier prompts, how much was computed again, and why.

`outline` represents the parts of a prompt as hashes, and finds the first part that changed. `prefix_hashes` counts the
tokens that two prompts have in common. `recent_prompts` finds the prompt to compare with, and explains the difference.
Nothing here stores text: only hashes and lengths.
"""
