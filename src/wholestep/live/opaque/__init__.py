"""Calls that are one record, though they are Python: steps of optimizers, clipping, modules. Records nothing itself."""
