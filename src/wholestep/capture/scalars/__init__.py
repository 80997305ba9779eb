"""In: Python numbers, text and ranks of a step. Out: symbols of the graph and checks on them. No tensors."""
