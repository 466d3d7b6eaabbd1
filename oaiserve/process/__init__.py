"""The engine in a process of its own: the messages between it and the front, its start, and its restart."""
