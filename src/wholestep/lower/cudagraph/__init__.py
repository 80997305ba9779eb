"""In: a function on a GPU. Out: CUDA graphs of it, captured and replayed. What runs inside is not its affair."""
