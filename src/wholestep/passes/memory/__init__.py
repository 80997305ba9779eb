"""In: a scheduled program. Out: one that needs fewer bytes: recomputation and writes in place."""
