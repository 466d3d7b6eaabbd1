"""Files that the server writes for itself: the small database, KV blocks, and the start cache."""
