"""This package guesses the next tokens of sequences, by a look-up or by a smaller model."""
