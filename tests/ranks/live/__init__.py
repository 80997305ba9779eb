"""Live steps on ranks: the numbers of eager code, pieces in step, and errors where ranks part."""
