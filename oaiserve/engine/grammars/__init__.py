"""Grammars of clients' constraints on an answer, and the tokens that they allow next."""
