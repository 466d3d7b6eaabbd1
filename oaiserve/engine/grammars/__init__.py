"""Grammars that constrain an answer, and the tokens that they allow next."""
