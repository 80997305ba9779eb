"""In: a lowered program and live objects. Out: calls. Nothing is planned or compiled here."""
