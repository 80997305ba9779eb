"""In: a program. Out: its order, its host work and its segments. No node computes something else afterwards."""
