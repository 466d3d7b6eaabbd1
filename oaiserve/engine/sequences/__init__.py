"""Sequences and the steps that compute them: the state that scheduler, drafts, accounts and models share. No torch."""
