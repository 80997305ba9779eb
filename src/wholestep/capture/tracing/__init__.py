"""In: a step context. Out: one run of the step on fake tensors, written down. All patches of torch stand here."""
