"""This package makes grammars of what clients ask of an answer, and finds out which tokens may come next."""
