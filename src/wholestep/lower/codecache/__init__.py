"""In: compiled code. Out: bytes of it, and code from bytes. What to compile is decided elsewhere."""
