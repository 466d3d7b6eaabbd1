"""The pages of the browser."""
