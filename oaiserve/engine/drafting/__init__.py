"""This package drafts the next tokens of sequences, which a step then verifies."""
