"""Sizes in a live step: those of what modules are given and give, and masks as indices, which have a size."""
