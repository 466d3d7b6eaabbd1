"""Scheduling: which sequences the next step computes, in which order, and the KV blocks that they own."""
