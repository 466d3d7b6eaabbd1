"""Whisper models: their start, and the decoding of sound files in processes of their own."""
