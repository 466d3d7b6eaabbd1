"""Parsers of the text of an answer: its reasoning, its tool calls, and its content.

They take text in any pieces, and know neither tokens, requests nor HTTP.
"""
