"""Executors of descriptions: each computes the steps of any described decoder, in a way of its own."""
