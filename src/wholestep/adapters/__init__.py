"""In: a trainer of another library. Out: its own loop, each step of which is one compiled call."""
