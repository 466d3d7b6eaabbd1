"""The description of a decoder, made from a model's files."""
