"""In: a step and its arguments. Out: everything live it can reach, named and in order. Nothing is traced."""
