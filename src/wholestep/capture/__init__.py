"""User code -> Program: the step is run once on fake tensors and written down."""
