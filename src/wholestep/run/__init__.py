"""Where a program meets processes: the world of ranks, what they agree on, and how a failure is named."""
