"""The Responses API: its route, the items and shape of an answer, and the store of answers."""
