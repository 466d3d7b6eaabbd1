"""Grammars of clients' constraints on an answer, and the tokens allowed next."""
