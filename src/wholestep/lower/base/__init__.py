"""In: a program. Out: the eager backend, and whether compiling pays. Nothing here imports Inductor."""
