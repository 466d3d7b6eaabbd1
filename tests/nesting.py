"""How deep JSON is nested that is to be refused."""

TOO_DEEP = 20_000  # levels: Python 3.11 reads about 1,000, and later versions 10,000
