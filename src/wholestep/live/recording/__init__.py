"""Facts about recorded calls of torch: operands, modes, paths, what an optimizer reads. Nothing is run here."""
