"""In: objects before and after a trace. Out: what the step changed in Python, undone, or refused."""
