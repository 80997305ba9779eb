"""Reads programs of any stage and changes none."""
