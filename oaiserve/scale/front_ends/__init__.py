"""Front ends: processes that serve HTTP and tokenize, for the engine process. docs/architecture.md has the picture."""
