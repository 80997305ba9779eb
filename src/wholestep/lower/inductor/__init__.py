"""In: a segment. Out: what Inductor compiles of it; one patch of Inductor a file. No policy."""
