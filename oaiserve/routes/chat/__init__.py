"""What a conversation says: contents, history, tools, and constraints on the answer."""
