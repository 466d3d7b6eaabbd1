"""Files that the server writes for itself: KV blocks, and the start cache."""
