"""Parsers that read the text of an answer: reasoning, tool calls, and what is left for the reader.

They take text as it comes, in any pieces, and know neither tokens, requests nor HTTP.
"""
