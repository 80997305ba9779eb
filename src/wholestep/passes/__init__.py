"""Functions from program to program."""
