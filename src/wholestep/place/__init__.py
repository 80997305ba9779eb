"""In: a captured program and a strategy. Out: the program with the collectives it needs. No order, no buckets."""
