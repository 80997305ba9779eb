"""In: a call. Out: whether a trace may be used again, else why not in one sentence. Nothing is traced here."""
