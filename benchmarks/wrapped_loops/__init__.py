"""Loops with wrapped models, as they are and with one line more."""
