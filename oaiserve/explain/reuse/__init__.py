"""Explains what a prompt reused of earlier ones, what of it was read again, and why.

`outline` has the parts of a prompt as hashes, and finds the first one that changed. `prefix_hashes` finds how many
tokens two prompts have in common. `recent_prompts` finds the prompt to compare with, and gives the explanation.
Nothing here stores text: only hashes and lengths.
"""
