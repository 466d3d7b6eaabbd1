"""`oaiserve diff` says by what two times differ: where requests spent more, or less, and for what cause."""
