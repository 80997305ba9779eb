"""Virtual ranks: a program run for several ranks in one process, and what `CompiledStep.verify` finds out with them."""
