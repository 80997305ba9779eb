"""Defaults of every test: one thread per process, because the ranks of a test share the cores."""

import os

# Before torch is imported by any test: OpenMP reads it once. Spawned ranks inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
