"""In: a traced graph that mutates. Out: the same graph without mutation. No live objects."""
