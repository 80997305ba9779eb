"""In: dims of arguments that move between calls. Out: symbols for them in a trace, and what the trace asks of them."""
