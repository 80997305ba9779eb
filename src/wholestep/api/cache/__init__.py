"""In: a compiled step. Out: the same on disk, and back in another process. What fits is told with its reason."""
