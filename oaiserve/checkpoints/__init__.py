"""The files of models: where they come from, their headers and metadata, the rejection of broken files, and the start
cache."""
