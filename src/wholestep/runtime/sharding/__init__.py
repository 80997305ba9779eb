"""In: live modules and optimizers, and a strategy. Out: the same, sharded. No graph."""
