"""Parsers of the text of an answer: its reasoning, its tool calls, and its content.

They accept text in any pieces, and know nothing of tokens, requests or HTTP.
"""
