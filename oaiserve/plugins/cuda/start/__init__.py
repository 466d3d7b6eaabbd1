"""The trials, comparisons and measurements of a start on a GPU, before the first request."""
