"""The record of a request, and the engine's numbers: plain data that the engine writes and all rooms read."""
