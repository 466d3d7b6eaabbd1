"""What a start on a GPU tries, compares and measures before the first request."""
